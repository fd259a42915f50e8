"""Send messages if runs of a deployment fail or are notable: a block with the address, and automations of Prefect.

The Prefect server sends them, so they are sent even if a worker has died.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import shlex
import urllib.parse
from typing import Any, NamedTuple
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
from penstock.flows.run.flow_runs import NOTABLE

__all__ = ["NOBODY", "Notify", "forget_messages", "put_messages"]


NOBODY = "none"
"""The value of `--notify` that deletes the messages."""


class Notify(NamedTuple):
    """Receiver of a deployment's messages: URL of a webhook, or of Apprise. It may hold a secret."""

    url: str

    @property
    def is_webhook(self) -> bool:
        """Whether the URL takes a JSON object."""
        return self.url.startswith(("http://", "https://"))

    @property
    def shown(self) -> str:
        """The address without its secrets."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname if self.is_webhook else ''}..."

    @classmethod
    def parse(cls, address: str) -> Notify:
        """Parse `--notify`. Raises SpecError if Apprise does not know the address."""
        notify = cls(address)
        if notify.is_webhook:
            known = bool(urllib.parse.urlsplit(address).hostname)
        else:
            logging.disable(logging.CRITICAL)  # Apprise's errors show the address
            known = "://" in address and apprise.Apprise.instantiate(address) is not None
            logging.disable(logging.NOTSET)
        if not known:  # not shown: it may hold a secret
            raise SpecError(
                "--notify is neither the http(s) URL of a webhook nor a URL that Apprise knows "
                "(github.com/caronc/apprise/wiki)",
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
        for wanted in (_automation(full_name, what, deployment_id, file, notify, block_id) for what in _STATES)
    }
    return {"to": notify.shown, "automations": made}


def forget_messages(client: SyncPrefectClient, full_name: str) -> bool:
    """Delete block and automations of a deployment. Returns whether there were any."""
    found = [each.id for what in _STATES for each in client.read_automations_by_name(f"{full_name}: {what}")]
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


def _block_name(full_name: str) -> str:
    """Reduce a name to lower-case letters, digits and dashes; the digest keeps different names apart."""
    return f"{re.sub('[^a-z0-9]+', '-', full_name.lower())}-{digest_of(full_name)[:6]}"


_STATES = {"a run failed": ("Failed", "Crashed", "TimedOut"), "look at a run": (NOTABLE,)}
"""What a message says -> states of a flow run that it is sent for."""

_FAILED = """\
pipeline: {pipeline}
run: {{{{ flow_run.name }}}}
{{{{ flow_run.state.name }}}}: {{{{ flow_run.state.message }}}}
{{% if "Next:" not in (flow_run.state.message or "") %}}Next: penstock log {file}
{{% endif %}}{{{{ flow_run | ui_url }}}}"""


def _automation(full_name: str, what: str, deployment_id: UUID, file: str, notify: Notify, block_id: UUID) -> AutomationCore:
    pipeline = full_name.partition("/")[2]
    return AutomationCore(
        name=f"{full_name}: {what}",
        description="Made by `penstock deploy --notify`.",
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in _STATES[what]},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={
                "prefect.resource.role": "deployment",
                "prefect.resource.id": f"prefect.deployment.{deployment_id}",
            },
            threshold=1,
            posture=Posture.Reactive,
            within=dt.timedelta(0),
        ),
        actions=[_message(notify, block_id, f"{pipeline}: {what}", _FAILED.format(pipeline=pipeline, file=shlex.quote(file)))],
    )


def _message(notify: Notify, block_id: UUID, subject: str, body: str) -> SendNotification | CallWebhook:
    """Make the action; a webhook gets a JSON object with `text`, as Slack, Mattermost, Teams and Google Chat take it."""
    if not notify.is_webhook:
        return SendNotification(block_document_id=block_id, subject=subject, body=body)
    payload = f"{{% set text %}}{subject}\n{body}{{% endset %}}" + "{{ {" + json.dumps("text") + ": text} | tojson }}"
    return CallWebhook(block_document_id=block_id, payload=payload)
