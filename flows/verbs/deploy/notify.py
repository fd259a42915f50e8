"""Who hears of a deployed pipeline that fails, or does not run? Two automations of Prefect, which call a webhook or send mail.

The server sends the messages, so they come also where the machine of the run is gone. The address lies in a block of Prefect,
encrypted, and is shown by none of its pages; nothing here writes it into a log or an error.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shlex
import urllib.parse
from typing import Any, NamedTuple
from uuid import UUID

from prefect.blocks.core import Block
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

__all__ = ["NOBODY", "Notify", "forget_messages", "notify_of", "put_messages", "sends_messages"]


NOBODY = "none"
"""What `--notify` takes to remove what an earlier one made."""

SILENCE_S = 25 * 3600.0
"""A day, and an hour, because today's run may begin later than yesterday's."""

_MAIL = re.compile(r"[^@\s/:,]+@[^@\s/:,]+\.[^@\s/:,]+")

_SMTP, _DEFAULT_SMTP = "PENSTOCK_SMTP", "smtp://127.0.0.1:25"
"""Variable that names the mail server, and the server where it is not set: one on the machine of the Prefect server."""


class Notify(NamedTuple):
    """What the messages of one deployment are sent to, and when."""

    url: str
    """Of a webhook, or Apprise's of a mail server and a receiver. It may hold a secret."""
    by_mail: bool
    silence_s: float | None
    """A message comes when no run has begun for so long; None for never."""

    @property
    def shown(self) -> str:
        """The address without what may be secret of it."""
        parts = urllib.parse.urlsplit(self.url)
        if self.by_mail:
            return urllib.parse.parse_qs(parts.query)["to"][0]
        return f"{parts.scheme}://{parts.hostname}/..."


def notify_of(address: str, cron: str, silence_h: float | None) -> Notify:
    """What `--notify` and `--silence-h` ask for.

    Args:
        address: of a webhook (http or https), or of a mailbox.
        cron: the schedule. Where it is not one of every day, silence is reported only if `silence_h` says after how long.
        silence_h: hours.

    Raises:
        SpecError: neither a URL nor a mail address, or a silence that Prefect cannot watch for.
    """
    daily = cron.split()[2:] == ["*", "*", "*"]
    silence_s = silence_h * 3600 if silence_h is not None else SILENCE_S if daily else None
    if silence_s is not None and silence_s < 10:
        raise SpecError(
            f"--silence-h {silence_h:g} is less than the 10 s that Prefect can watch for", next_step="give more hours"
        )
    if _MAIL.fullmatch(address):
        return Notify(_mail_url(address), True, silence_s)
    try:
        parts = urllib.parse.urlsplit(address)
        known = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        known = False
    if not known:  # not shown: it may hold a secret, whatever it is
        raise SpecError(
            "--notify is neither the http(s) URL of a webhook nor a mail address",
            next_step="--notify https://hooks.example.com/..., --notify ops@example.org, or --notify none",
        )
    return Notify(address, False, silence_s)


def _mail_url(receiver: str) -> str:
    """As Apprise takes it. Raises SpecError for a mail server that cannot be understood."""
    given = os.environ.get(_SMTP) or _DEFAULT_SMTP
    try:
        parts = urllib.parse.urlsplit(given)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("smtp", "smtps") or host is None:
        raise SpecError(
            f"{_SMTP} is no address of a mail server", next_step="write it as smtps://user:password@mail.example.org:587"
        )
    user = f"{parts.username}:{parts.password or ''}@" if parts.username else ""
    secure = parts.scheme == "smtps"
    account = urllib.parse.unquote(parts.username or "")
    sender = account if _MAIL.fullmatch(account) else f"penstock@{receiver.partition('@')[2]}"
    query = {
        "to": receiver,
        "from": sender,
        "mode": "starttls" if secure else "insecure",
        "format": "text",
    }
    return (
        f"{'mailtos' if secure else 'mailto'}://{user}{host}:{port or (587 if secure else 25)}?{urllib.parse.urlencode(query)}"
    )


def put_messages(client: SyncPrefectClient, full_name: str, deployment_id: UUID, file: str, notify: Notify) -> dict[str, Any]:
    """Make or update block and automations of a deployment. Returns what `--json` says of them, without the address."""
    _delete_block(client, full_name, Webhook if notify.by_mail else SlackWebhook)
    block: Block
    if notify.by_mail:
        # Of the blocks that the server knows this one takes any address of Apprise, mail among them.
        block = SlackWebhook(url=SecretStr(notify.url))
    else:
        block = Webhook(url=SecretStr(notify.url), headers=SecretDict({"content-type": "application/json"}))
    saved = UUID(str(block.save(_block_name(full_name), overwrite=True)))
    wanted = _automations(full_name, deployment_id, file, notify, saved)
    made = {}
    for name in _names(full_name):
        there = client.read_automations_by_name(name)
        for extra in there[1:] if name in wanted else there:
            client.delete_automation(extra.id)
        if name in wanted and there:
            client.update_automation(there[0].id, wanted[name])
            made[name] = str(there[0].id)
        elif name in wanted:
            made[name] = str(client.create_automation(wanted[name]))
    return {
        "to": notify.shown,
        "by": "mail" if notify.by_mail else "webhook",
        "silence_s": notify.silence_s,
        "automations": made,
    }


def forget_messages(client: SyncPrefectClient, full_name: str) -> bool:
    """Remove what `put_messages` made. Returns whether there was something."""
    found = [automation for name in _names(full_name) for automation in client.read_automations_by_name(name)]
    for automation in found:
        client.delete_automation(automation.id)
    for kind in (Webhook, SlackWebhook):
        _delete_block(client, full_name, kind)
    return bool(found)


def sends_messages(client: SyncPrefectClient, full_name: str) -> bool:
    """Whether a deployment has such automations."""
    return any(client.read_automations_by_name(name) for name in _names(full_name))


def _names(full_name: str) -> tuple[str, str]:
    return f"{full_name}: a run failed", f"{full_name}: nothing has run"


def _block_name(full_name: str) -> str:
    """Prefect takes small letters, digits and dashes; the digest tells names apart that are the same in those."""
    return f"{re.sub('[^a-z0-9]+', '-', full_name.lower())}-{digest_of(full_name)[:6]}"


def _delete_block(client: SyncPrefectClient, full_name: str, kind: type[Block]) -> None:
    try:
        document = client.read_block_document_by_name(_block_name(full_name), kind.get_block_type_slug(), include_secrets=False)
    except ObjectNotFound:
        return
    if document.id is not None:
        client.delete_block_document(document.id)


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


def _automations(full_name: str, deployment_id: UUID, file: str, notify: Notify, block_id: UUID) -> dict[str, AutomationCore]:
    """By name."""
    failed, silent = _names(full_name)
    pipeline, file = full_name.partition("/")[2], shlex.quote(file)
    ours = {"prefect.resource.role": "deployment", "prefect.resource.id": f"prefect.deployment.{deployment_id}"}
    common: dict[str, Any] = {"match": {"prefect.resource.id": "prefect.flow-run.*"}, "match_related": ours, "threshold": 1}
    made = {
        failed: AutomationCore(
            name=failed,
            description="Made by `penstock deploy --notify`.",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
                posture=Posture.Reactive,
                within=dt.timedelta(0),
                **common,
            ),
            actions=[_message(notify, block_id, f"{pipeline}: a run failed", _FAILED.format(pipeline=pipeline, file=file))],
        )
    }
    if notify.silence_s is not None:
        said = _SILENT.format(pipeline=pipeline, full_name=full_name, hours=notify.silence_s / 3600, file=file)
        made[silent] = AutomationCore(
            name=silent,
            description="Made by `penstock deploy --notify`.",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Running"},
                posture=Posture.Proactive,
                within=dt.timedelta(seconds=notify.silence_s),
                **common,
            ),
            actions=[_message(notify, block_id, f"{pipeline}: nothing has run", said)],
        )
    return made


def _message(notify: Notify, block_id: UUID, subject: str, body: str) -> SendNotification | CallWebhook:
    """Of a webhook the text is what Slack, Mattermost, Teams and Google Chat show: a JSON object with `text`."""
    if notify.by_mail:
        return SendNotification(block_document_id=block_id, subject=subject, body=body)
    payload = f"{{% set text %}}{subject}\n{body}{{% endset %}}" + "{{ {" + json.dumps("text") + ": text} | tojson }}"
    return CallWebhook(block_document_id=block_id, payload=payload)
