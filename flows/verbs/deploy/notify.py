"""Send messages if runs of a deployment fail or do not begin: a block with the address, and automations of Prefect.

The Prefect server sends the messages, so they are sent even if a worker has died.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import shlex
import urllib.parse
from typing import Any, Literal, NamedTuple
from uuid import UUID

import apprise
from prefect.blocks.notifications import SlackWebhook
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import CallWebhook, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict
from pydantic import SecretStr

from penstock.digest import digest_of
from penstock.errors import SpecError

__all__ = ["NOBODY", "Notify", "forget_messages", "notify_of", "put_messages"]


NOBODY = "none"
"""The value of `--notify` that deletes the messages."""

SILENCE_S = 25 * 3600.0
"""A day and an hour, since a run may begin later than the day before."""


class Notify(NamedTuple):
    """Receiver and conditions of a deployment's messages."""

    url: str
    """URL of a webhook, or of Apprise for mail and other services. It may hold a secret."""
    silence_s: float | None
    """Seconds without a new run before a message is sent; None for never."""

    @property
    def is_webhook(self) -> bool:
        """Whether the URL takes a JSON object."""
        return self.url.startswith(("http://", "https://"))

    @property
    def shown(self) -> str:
        """The address without its secrets."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname if self.is_webhook else ''}..."


def notify_of(address: str, cron: str, silence_h: float | None) -> Notify:
    """Parse `--notify` and `--silence-h`.

    Args:
        address: http(s) URL of a webhook, or a URL as Apprise takes it.
        cron: the schedule. A missing run is reported for a daily schedule, or after `silence_h`.
        silence_h: hours.

    Raises:
        SpecError: Apprise does not know the address, or `silence_h` is too short for Prefect.
    """
    daily = cron.split()[2:] == ["*", "*", "*"]
    silence_s = silence_h * 3600 if silence_h is not None else SILENCE_S if daily else None
    if silence_s is not None and silence_s < 10:
        raise SpecError(
            f"--silence-h {silence_h:g} is less than 10 s, the least that Prefect takes", next_step="give more hours"
        )
    notify = Notify(address, silence_s)
    if notify.is_webhook:
        known = bool(urllib.parse.urlsplit(address).hostname)
    else:
        logging.disable(logging.CRITICAL)  # Apprise's errors show the address
        known = "://" in address and apprise.Apprise.instantiate(address) is not None
        logging.disable(logging.NOTSET)
    if not known:  # not shown: it may hold a secret
        raise SpecError(
            "--notify is neither the http(s) URL of a webhook nor a URL that Apprise knows (github.com/caronc/apprise/wiki)",
            next_step="for a chat: --notify https://hooks.example.com/...; "
            "for mail: --notify 'mailtos://USER:PASSWORD@mail.example.org?to=ops@example.org'; to end it: --notify none",
        )
    return notify


def put_messages(client: SyncPrefectClient, full_name: str, deployment_id: UUID, file: str, notify: Notify) -> dict[str, Any]:
    """Replace block and automations of a deployment. Returns the entry `notify` of `--json`, without the address."""
    forget_messages(client, full_name)
    if notify.is_webhook:
        block: Webhook | SlackWebhook = Webhook(
            url=SecretStr(notify.url), headers=SecretDict({"content-type": "application/json"})
        )
    else:
        block = SlackWebhook(url=SecretStr(notify.url))  # it takes any URL of Apprise
    block_id = UUID(str(block.save(_block_name(full_name), overwrite=True)))
    made = {
        wanted.name: str(client.create_automation(wanted))
        for wanted in _automations(full_name, deployment_id, file, notify, block_id)
    }
    return {"to": notify.shown, "silence_s": notify.silence_s, "automations": made}


def forget_messages(client: SyncPrefectClient, full_name: str) -> bool:
    """Delete block and automations of a deployment. Returns whether there were automations."""
    found = [each.id for name in _names(full_name) for each in client.read_automations_by_name(name)]
    for automation_id in found:
        client.delete_automation(automation_id)
    for kind in (Webhook, SlackWebhook):
        try:
            name, slug = _block_name(full_name), kind.get_block_type_slug()
            document = client.read_block_document_by_name(name, slug, include_secrets=False)
        except ObjectNotFound:
            continue
        if document.id is not None:
            client.delete_block_document(document.id)
    return bool(found)


def _names(full_name: str) -> tuple[str, str]:
    return f"{full_name}: a run failed", f"{full_name}: nothing has run"


def _block_name(full_name: str) -> str:
    """Reduce a name to lower-case letters, digits and dashes; the digest keeps different names apart."""
    return f"{re.sub('[^a-z0-9]+', '-', full_name.lower())}-{digest_of(full_name)[:6]}"


_FAILED = """\
pipeline: {pipeline}
run: {{{{ flow_run.name }}}}
{{{{ flow_run.state.name }}}}: {{{{ flow_run.state.message }}}}
{{% if "Next:" not in (flow_run.state.message or "") %}}Next: penstock log {file}
{{% endif %}}{{{{ flow_run | ui_url }}}}"""

_SILENT = """\
pipeline: {pipeline}
no run of {full_name} has begun for {hours:g} hours
Next: see that a worker serves its work pool (prefect worker start), then: penstock log {file}"""


_Posture = Literal[Posture.Reactive, Posture.Proactive]


def _automations(full_name: str, deployment_id: UUID, file: str, notify: Notify, block_id: UUID) -> list[AutomationCore]:
    failed, silent = _names(full_name)
    words = {"pipeline": full_name.partition("/")[2], "full_name": full_name, "file": shlex.quote(file)}
    ours: dict[str, str | list[str]] = {
        "prefect.resource.role": "deployment",
        "prefect.resource.id": f"prefect.deployment.{deployment_id}",
    }

    def automation(name: str, body: str, posture: _Posture, within_s: float, *states: str) -> AutomationCore:
        return AutomationCore(
            name=name,
            description="Made by `penstock deploy --notify`.",
            trigger=EventTrigger(
                expect={f"prefect.flow-run.{state}" for state in states},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related=ours,
                threshold=1,
                posture=posture,
                within=dt.timedelta(seconds=within_s),
            ),
            actions=[_message(notify, block_id, name.replace(full_name, words["pipeline"]), body)],
        )

    made = [automation(failed, _FAILED.format(**words), Posture.Reactive, 0, "Failed", "Crashed", "TimedOut")]
    if notify.silence_s is not None:
        body = _SILENT.format(**words, hours=notify.silence_s / 3600)
        made.append(automation(silent, body, Posture.Proactive, notify.silence_s, "Running"))
    return made


def _message(notify: Notify, block_id: UUID, subject: str, body: str) -> SendNotification | CallWebhook:
    """Make the action; a webhook gets a JSON object with `text`, as Slack, Mattermost, Teams and Google Chat take it."""
    if not notify.is_webhook:
        return SendNotification(block_document_id=block_id, subject=subject, body=body)
    payload = f"{{% set text %}}{subject}\n{body}{{% endset %}}" + "{{ {" + json.dumps("text") + ": text} | tojson }}"
    return CallWebhook(block_document_id=block_id, payload=payload)
