"""Which runs are dead although Prefect shows them as running? This makes the automation that marks them Crashed.

A flow run sends heartbeats, and nothing in Prefect watches for them by itself: a machine that loses power leaves a run Running.
penstock repairs this too, but only when the pipeline is run again. A run killed before its first heartbeat is not found.

    PREFECT_API_URL=http://127.0.0.1:4200/api python deployments/automations.py
"""

from __future__ import annotations

import argparse
import datetime as dt

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.settings import get_current_settings
from prefect.states import StateType

NAME = "penstock: a run without heartbeats has crashed"
HEARTBEAT = "prefect.flow-run.heartbeat"
ENDINGS = ("Completed", "Failed", "Cancelled", "Crashed")
SLACK = 2.5
"""How many intervals without a heartbeat make a run dead. With less than one, a healthy run was seen to be marked Crashed."""


def automation(heartbeat_s: int) -> Automation:
    """The rule: a heartbeat that is followed, for `SLACK` intervals, by neither another one nor an end."""
    return Automation(
        name=NAME,
        description="Frees runs whose process or machine vanished. Made by deployments/automations.py.",
        trigger=EventTrigger(
            after={HEARTBEAT},
            expect={HEARTBEAT, *(f"prefect.flow-run.{ending}" for ending in ENDINGS)},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=dt.timedelta(seconds=SLACK * heartbeat_s),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"no heartbeat for {SLACK * heartbeat_s:g} s")],
    )


def main() -> None:
    """Make the automation, or bring the existing one up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_s = get_current_settings().flows.heartbeat_frequency or 180
    parser.add_argument(
        "--heartbeat-s", type=int, default=default_s, help="PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the workers (%(default)s)"
    )
    wanted = automation(parser.parse_args().heartbeat_s)
    with get_client(sync_client=True) as client:
        for old in client.read_automations_by_name(NAME):
            client.delete_automation(old.id)
    made = wanted.create()
    print(f"{made.id}: {NAME}")


if __name__ == "__main__":
    main()
