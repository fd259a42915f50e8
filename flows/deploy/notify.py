"""Send messages if runs of a deployment fail or are notable: a block with the address, and automations of Prefect.

The Prefect server sends them, so they are sent even if a worker has died.
"""

from __future__ import annotations

import datetime as dt
import logging
import re
import shlex
import urllib.parse
from typing import Any, NamedTuple
from uuid import UUID

import apprise
from prefect.blocks.notifications import SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from penstock.digest import digest_of
from penstock.errors import SpecError
from penstock.flows.run.flow_runs import NOTABLE

__all__ = ["NOBODY", "Notify", "forget_messages", "put_messages"]

NOBODY = "none"
"""The value of `--notify` that deletes the messages."""


class Notify(NamedTuple):
    """Receiver of a deployment's messages."""

    url: str
    """Apprise's. It may hold a secret."""
    shown: str
    """The address without its secrets."""

    @classmethod
    def parse(cls, address: str) -> Notify:
        """Parse `--notify`. Raises SpecError if Apprise does not know the address."""
        parts = urllib.parse.urlsplit(address)
        url, shown = address, f"{parts.scheme}://..."
        if parts.scheme in ("http", "https"):
            if "%2f" in parts.path.lower() or ";" in parts.path:  # Apprise would send to another path
                raise SpecError(
                    "--notify: the path of this address has %2F or a semicolon, which would not arrive as it is written",
                    next_step="give an address without; a service that relays to it can have one",
                )
            # Of Apprise's JSON object a webhook gets the message alone, as `text`, as Slack, Teams and others take it.
            fields = {":message": "text", ":title": "", ":version": "", ":attachments": "", ":type": ""}
            query = {f"-{name}": value for name, value in urllib.parse.parse_qsl(parts.query, keep_blank_values=True)} | fields
            scheme = parts.scheme.replace("http", "json")
            url = parts._replace(scheme=scheme, query=urllib.parse.urlencode(query)).geturl()
            shown = f"{parts.scheme}://{parts.hostname}..."
        logging.disable(logging.CRITICAL)  # Apprise's errors show the address
        known = "://" in url and apprise.Apprise.instantiate(url) is not None
        logging.disable(logging.NOTSET)
        if not known:  # not shown: it may hold a secret
            raise SpecError(
                "--notify is neither the http(s) URL of a webhook nor a URL that Apprise knows "
                "(github.com/caronc/apprise/wiki)",
                next_step="for a chat: --notify https://hooks.example.com/...; "
                "for mail: --notify 'mailtos://USER:PASSWORD@mail.example.org?to=ops@example.org'; to end it: --notify none",
            )
        return cls(url, shown)


def put_messages(client: SyncPrefectClient, full_name: str, deployment_id: UUID, file: str, notify: Notify) -> dict[str, Any]:
    """Replace block and automations of a deployment. Returns the entry `notify` of `--json`, without the address."""
    forget_messages(client, full_name, deployment_id)
    block = SlackWebhook(url=SecretStr(notify.url))  # it takes any URL of Apprise
    block_id = UUID(str(block.save(_block_name(full_name), overwrite=True)))
    automation = client.create_automation(_automation(full_name, deployment_id, file, block_id))
    return {"to": notify.shown, "automation": str(automation)}


def forget_messages(client: SyncPrefectClient, full_name: str, deployment_id: UUID) -> bool:
    """Delete block and automations of a deployment. Returns whether there were any."""
    client.delete_resource_owned_automations(_resource(deployment_id))
    try:
        name, slug = _block_name(full_name), SlackWebhook.get_block_type_slug()
        document = client.read_block_document_by_name(name, slug, include_secrets=False)
    except ObjectNotFound:
        return False
    if document.id is not None:
        client.delete_block_document(document.id)
    return True


def _resource(deployment_id: UUID) -> str:
    return f"prefect.deployment.{deployment_id}"


def _block_name(full_name: str) -> str:
    """Reduce a name to lower-case letters, digits and dashes; the digest keeps different names apart."""
    return f"{re.sub('[^a-z0-9]+', '-', full_name.lower())}-{digest_of(full_name)[:6]}"


_STATES = ("Failed", "Crashed", "TimedOut", NOTABLE)
"""States of a flow run that a message is sent for."""

_BODY = """\
{subject}
run: {{{{ flow_run.name }}}}
{{{{ flow_run.state.message }}}}
{{% if "Next:" not in (flow_run.state.message or "") %}}Next: penstock log {file}
{{% endif %}}{{{{ flow_run | ui_url }}}}"""


def _automation(full_name: str, deployment_id: UUID, file: str, block_id: UUID) -> AutomationCore:
    subject = f"{full_name.partition('/')[2]}: {{{{ flow_run.state.name }}}}"
    body = _BODY.format(subject=subject, file=shlex.quote(file))
    return AutomationCore(
        name=f"{full_name}: messages",
        description="Made by `penstock deploy --notify`.",
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in _STATES},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.role": "deployment", "prefect.resource.id": _resource(deployment_id)},
            threshold=1,
            posture=Posture.Reactive,
            within=dt.timedelta(0),
        ),
        actions=[SendNotification(block_document_id=block_id, subject=subject, body=body)],
        owner_resource=_resource(deployment_id),
    )
