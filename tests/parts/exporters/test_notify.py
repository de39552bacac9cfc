"""Notifications reach their receivers, and never delay or fail the run."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.errors import SpecError
from launcher.exporters.notify import DeliveryError, Notifier, Recipients, post
from launcher.plan.rendering import render_spec
from launcher.report.goodput import Goodput
from launcher.report.journal_line import Message
from launcher.report.models import AttemptReport, TaskReport
from launcher.report.notification import MESSAGE_LIMIT, Notification, Notifications, make_payload, make_variables
from launcher.report.run_events import AttemptEnded, Ended, Record, RunEvent, State
from launcher.report.status_report import RunStatus
from launcher.spec.explain import explain_fields
from launcher.spec.loading import load_spec
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import NotifySpec
from launcher.verdict.models import Verdict
from tests.harness.builders.statuses import make_status
from tests.harness.polling import eventually
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.web_servers import Request, WebServer, serving
from tests.harness.witness import assert_none_left, await_none_left, make_mark, marked, wait_until
from worker_entry.protocol import environment

COVERS = (
    "launcher/exporters/start.py",
    "launcher/exporters/notify.py",
)

ALL = ("failed", "restarted", "stalled", "succeeded")


def happen(*events: RunEvent) -> list[Notification]:
    notifications = Notifications()
    found = [notifications.note(Record(10.0 + n, 1, event)) for n, event in enumerate(events)]
    return [notification for notification in found if notification is not None]


def attempt_ended(reference: str, message: str = "it broke") -> AttemptEnded:
    task = TaskReport(task="worker:1", node="gpu-b", address="gpu-b:20000", log="attempt-1/worker-1.log")
    verdict = Verdict(reference=reference, message=message, task="worker:1")
    return AttemptEnded(
        AttemptReport(attempt=1, started=1.0, ended=2.0, tasks=[task], verdict=verdict, processes_left=0)
    )


class TestNotifications:
    def test_a_failure_notification_names_the_causing_task_and_its_host(self) -> None:
        [failed] = happen(attempt_ended("task-failed"), Ended("failed", 1, "task-failed", "it broke"))
        assert (failed.event, failed.task, failed.host, failed.time) == ("failed", "worker:1", "gpu-b", 11.0)

    def test_a_stall_and_then_its_restart_are_notified(self) -> None:
        found = happen(
            attempt_ended("stalled", "no step for 120 s"),
            State("restarting", "stalled", "no step for 120 s"),
            State("forming"),
            Ended("succeeded", 0, "succeeded", "all succeeded"),
        )
        assert [notification.event for notification in found] == ["stalled", "restarted", "succeeded"]
        assert [notification.task for notification in found] == ["worker:1", "worker:1", None]

    def test_an_interrupted_run_causes_no_notification(self) -> None:
        assert (
            happen(Message("error", "x"), State("running"), Ended("interrupted", 130, "interrupted", "by SIGINT")) == []
        )

    def test_a_notification_message_is_redacted_and_truncated(self) -> None:
        [failed] = happen(Ended("failed", 1, "task-failed", "cannot reach https://alice:sesame@host/ " + "x" * 9999))
        assert "sesame" not in failed.message
        assert len(failed.message) == MESSAGE_LIMIT

    def test_a_notification_payload_has_all_facts_and_a_text_for_chats(self) -> None:
        [failed] = happen(attempt_ended("task-failed"), Ended("failed", 1, "task-failed", "it broke"))
        payload = make_payload(failed, run_id="r-1", name="mnist", directory="/runs/r-1", started=1.0, goodput=0.9)
        assert payload == {
            "event": "failed",
            "run": "r-1",
            "name": "mnist",
            "reference": "task-failed",
            "message": "it broke",
            "task": "worker:1",
            "host": "gpu-b",
            "attempt": 1,
            "time": 11.0,
            "elapsed_s": 10.0,
            "goodput": 0.9,
            "directory": "/runs/r-1",
            "text": "mnist failed: it broke (r-1, attempt 1)",
        }

    def test_notification_variables_are_valid_in_any_process_environment(self) -> None:
        [failed] = happen(Ended("failed", 1, "task-failed", "a\0b \ud83d"))
        payload = make_payload(failed, run_id="r-1", name="mnist", directory="/runs/r-1", started=1.0, goodput=None)
        variables = make_variables(payload)
        assert set(variables) == set(environment.OF_NOTIFICATIONS)
        done = subprocess.run(["env", "-0"], env=variables, capture_output=True, check=True)
        assert dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line) == variables
        assert environment.RUN_ID not in variables  # otherwise the command would be one of the run's processes


# --- the webhook ---


def drip(request: Request) -> None:
    """Answers a byte from time to time, and never ends."""
    while True:
        try:
            request.wfile.write(b"H")
            request.wfile.flush()
        except OSError:
            return
        time.sleep(0.05)


def hang_until(released: threading.Event) -> Callable[[Request], None]:
    def take(_: Request) -> None:
        released.wait(30)

    return take


def redirect(code: int, place: Callable[[WebServer], str]) -> Callable[[Request], None]:
    def take(request: Request) -> None:
        if "moved" in request.path:
            request.answer(200)
        else:
            request.answer(code, Location=place(request.server))

    return take


class TestPost:
    def test_the_webhook_receives_the_payload(self) -> None:
        with serving() as server:
            post(server.url, b'{"a": 1}', 5.0)
        assert (server.bodies, server.paths) == ([b'{"a": 1}'], ["/hooks/sesame"])

    def test_a_login_in_the_webhook_url_becomes_an_authorization_header(self) -> None:
        logins: list[str | None] = []

        def take(request: Request) -> None:
            logins.append(request.headers["Authorization"])
            request.answer(204)

        with serving(take) as server:
            post(server.url.replace("//", "//alice:sesame@"), b"{}", 5.0)
        assert logins == ["Basic YWxpY2U6c2VzYW1l"]

    @pytest.mark.parametrize("status", [400, 404, 500, 503])
    def test_an_http_error_status_of_the_webhook_is_a_delivery_error(self, status: int) -> None:
        with serving(lambda request: request.answer(status)) as server:
            with pytest.raises(DeliveryError, match=f"^the server answered {status}$"):
                post(server.url, b"{}", 5.0)

    def test_a_webhook_redirect_on_the_same_server_is_followed_with_the_payload(self) -> None:
        with serving(redirect(307, lambda server: "/moved")) as server:
            post(server.url, b"{}", 5.0)
        assert (server.bodies, server.paths) == ([b"{}", b"{}"], ["/hooks/sesame", "/moved"])

    @pytest.mark.parametrize("code", [301, 302, 303])
    def test_a_webhook_redirect_that_drops_the_payload_is_not_followed(self, code: int) -> None:
        with serving(redirect(code, lambda server: "/moved")) as server:
            with pytest.raises(DeliveryError, match=f"answered {code}, a redirect that is not followed"):
                post(server.url, b"{}", 5.0)
        assert (len(server.bodies), server.gets) == (1, 0)

    @pytest.mark.parametrize(
        "place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "https://127.0.0.1/x", "//127.0.0.2/"]
    )
    def test_a_webhook_redirect_to_another_scheme_or_server_is_not_followed(self, place: str) -> None:
        with serving(redirect(307, lambda server: place)) as server:
            with pytest.raises(DeliveryError) as caught:
                post(server.url, b"{}", 5.0)
        assert len(server.bodies) == 1
        assert "passwd" not in str(caught.value)

    def test_circular_webhook_redirects_are_a_delivery_error(self) -> None:
        with serving(redirect(307, lambda server: "/hooks/sesame")) as server:
            with pytest.raises(DeliveryError, match="answered 307"):
                post(server.url, b"{}", 5.0)
        assert len(server.bodies) <= 5

    def test_a_hanging_webhook_times_out(self) -> None:
        released = threading.Event()
        with serving(hang_until(released)) as server:
            with pytest.raises(DeliveryError, match=r"no answer within 0\.3 s"):
                post(server.url, b"{}", 0.3)
            released.set()

    def test_a_webhook_with_an_unknown_certificate_receives_nothing(self, tmp_path: Path) -> None:
        with serving(tls=make_tls(tmp_path)) as server:
            with pytest.raises(DeliveryError, match="the server's certificate cannot be verified"):
                post(server.url.replace("http:", "https:"), b"{}", 5.0)
        assert server.bodies == []

    def test_a_webhook_certificate_that_this_machine_trusts_is_accepted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with serving(tls=make_tls(tmp_path)) as server:
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
            post(server.url.replace("http:", "https:"), b"{}", 5.0)
        assert server.bodies == [b"{}"]

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("http://127.0.0.1:{closed}/sesame", "connection refused"),
            ("https://127.0.0.1:{plain}/sesame", "no secure connection to the server"),
            ("http://127.0.0.1:{odd}/sesame", "the server's answer is not HTTP"),
            ("http://sesame.invalid/", "the server's name cannot be resolved"),
            ("http://127.0.0.1:sesame/", "the URL is not the URL of a web server"),
            ("http://[sesame/", "the URL is not the URL of a web server"),
            ("http:///sesame", "the URL is not the URL of a web server"),
            ("file:///sesame", "the URL is not the URL of a web server"),
        ],
    )
    def test_webhook_errors_contain_no_part_of_the_url(self, url: str, said: str) -> None:
        def answer_odd(request: Request) -> None:
            request.wfile.write(b"SESAME\r\n\r\n")

        with socket.socket() as unused, serving() as plain, serving(answer_odd) as odd:
            unused.bind(("127.0.0.1", 0))
            ports = {"closed": unused.getsockname()[1], "plain": plain.server_port, "odd": odd.server_port}
            with pytest.raises(DeliveryError) as caught:
                post(url.format(**ports), b"{}", 5.0)
        assert said in str(caught.value)
        assert "sesame" not in str(caught.value)
        assert caught.value.__suppress_context__


def make_tls(folder: Path) -> ssl.SSLContext:
    """A server's TLS context, with a self-signed certificate."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


# --- deliveries ---


def status() -> RunStatus:
    return make_status(goodput=Goodput(training_s=3.0, connecting_s=1.0, share=0.75))


FAILED = Record(11.0, 1, Ended("failed", 1, "task-failed", "it broke"))
SUCCEEDED = Record(12.0, 1, Ended("succeeded", 0, "succeeded", "all succeeded"))


@contextmanager
def notifying(
    folder: Path, url: str | None = None, command: list[str] | None = None, on: tuple[str, ...] = ALL
) -> Iterator[tuple[Notifier, list[str]]]:
    """Yields a notifier and its warnings."""
    warnings: list[str] = []
    notifier = Notifier(Recipients(url, command, frozenset(on), str(folder)), status, warnings.append)
    try:
        yield notifier, warnings
    finally:
        notifier.close()


class TestNotifier:
    def test_notifications_arrive_in_order_with_the_goodput(self, tmp_path: Path) -> None:
        with serving() as server, notifying(tmp_path, server.url) as (notifier, warnings):
            for record in (FAILED, SUCCEEDED):
                notifier.note(record)
            notifier.settle()
        assert [said["event"] for said in server.said] == ["failed", "succeeded"]
        assert [said["goodput"] for said in server.said] == [0.75, 0.75]
        assert warnings == []

    def test_only_requested_events_are_notified(self, tmp_path: Path) -> None:
        with serving() as server, notifying(tmp_path, server.url, on=("succeeded",)) as (notifier, _):
            for record in (FAILED, SUCCEEDED):
                notifier.note(record)
            notifier.settle()
        assert [said["event"] for said in server.said] == ["succeeded"]

    def test_a_notify_command_gets_the_payload_on_stdin_and_facts_as_variables(self, tmp_path: Path) -> None:
        command = ["sh", "-c", 'cat > got.json; echo "$DISTLAUNCH_EVENT $DISTLAUNCH_RUN" > got.txt; seq 200000']
        with notifying(tmp_path, command=command) as (notifier, warnings):
            notifier.note(FAILED)
            notifier.settle()
        assert json.loads((tmp_path / "got.json").read_text())["message"] == "it broke"
        assert (tmp_path / "got.txt").read_text() == "failed r-1\n"
        assert warnings == []

    def test_a_hanging_notify_command_does_not_block_the_webhook(self, tmp_path: Path) -> None:
        mark = make_mark()
        with serving() as server, notifying(tmp_path, server.url, hanging(mark)) as (notifier, warnings):
            notifier.note(FAILED)
            eventually(lambda: check(server.bodies != [] and marked(mark) != []))
            notifier.settle(0.2)
            await_none_left(mark)
        assert warnings == ["a notification was not delivered: the end of the run waits for 0.2 s at most"]

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (["sh", "-c", "echo first >&2; echo last words >&2; exit 3"], "it ended with status 3: last words"),
            (["sh", "-c", "kill -9 $$"], "it ended with SIGKILL"),
            (["sh", "-c", "seq 200000 >&2; exit 1"], "it ended with status 1: 200000"),
            (["./missing"], "it cannot be run: No such file or directory"),
            (["sh", "-c", "echo TOKEN=sesame >&2; exit 1"], "it ended with status 1: TOKEN=(redacted)"),
        ],
    )
    def test_a_failing_notify_command_causes_one_warning(self, command: list[str], said: str, tmp_path: Path) -> None:
        with notifying(tmp_path, command=command) as (notifier, warnings):
            for record in (FAILED, SUCCEEDED):
                notifier.note(record)
            notifier.settle()
        assert warnings == [f"the command of `notify` has failed: {said}"]

    def test_notification_deliveries_time_out_after_their_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("launcher.exporters.notify.LIMIT_S", 0.2)
        monkeypatch.setattr("launcher.exporters.notify.OVERTIME_S", 0.2)
        mark = make_mark()
        with serving(drip) as server, notifying(tmp_path, server.url, hanging(mark)) as (notifier, warnings):
            notifier.note(FAILED)
            notifier.settle(10.0)
            assert_none_left(mark)
        assert sorted(warnings) == [
            "the command of `notify` has failed: it did not end within 0.2 s",
            "the webhook of `notify` was not delivered: no answer within 0.2 s",
        ]

    def test_the_queue_of_notifications_is_bounded(self, tmp_path: Path) -> None:
        release = threading.Event()
        with serving(hang_until(release)) as server:
            with notifying(tmp_path, server.url) as (notifier, warnings):
                for _ in range(200):
                    notifier.note(FAILED)
                notifier.settle(0.1)
                release.set()
        assert warnings[0] == "too many notifications wait for delivery; some are dropped"
        assert len(warnings) == 2


def check(condition: bool) -> None:
    assert condition


def hanging(mark: dict[str, str]) -> list[str]:
    [(name, value)] = mark.items()
    return ["env", f"{name}={value}", "sh", "-c", "trap '' TERM; sleep 600 & sleep 600"]


# --- runs ---


def write_spec(folder: Path, notify: str, program: str = "[sh, -c, 'exit 3']", more: str = "") -> str:
    spec = folder / "spec.yaml"
    spec.write_text(f"nodes: [{{host: local}}]\nprogram: {{command: {program}}}\nnotify: {notify}\n{more}")
    return str(spec)


def read_all(folder: Path) -> str:
    """The text of every file of a run."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    return "\n".join(path.read_text(errors="replace") for path in files)


@pytest.mark.slow
class TestRuns:
    @pytest.mark.smoke
    def test_restart_and_failure_are_notified_without_exposing_the_webhook_url(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        with serving() as server:
            spec = write_spec(
                tmp_path, f"{{webhook: '{server.url}', on: [failed, restarted]}}", more="restart: {max_restarts: 1}\n"
            )
            ran = distlaunch("up", "--no-check", spec)
        assert ran.status == 1
        assert [said["event"] for said in server.said] == ["restarted", "failed"]
        last = server.said[-1]
        assert (last["attempt"], last["reference"], last["task"], last["host"]) == (
            2,
            "task-failed",
            "worker:0",
            "local",
        )
        assert (last["directory"], last["run"]) == (str(ran.directory), ran.report["run_id"])
        assert last["elapsed_s"] > 0
        assert last["goodput"] == pytest.approx(ran.report["goodput"]["share"], abs=0.1)
        assert "sesame" not in ran.stderr + ran.stdout + read_all(ran.directory)

    def test_a_failed_webhook_delivery_is_a_warning_and_the_run_succeeds(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        with serving(lambda request: request.answer(500)) as server:
            ran = distlaunch("up", "--no-check", write_spec(tmp_path, f"{{webhook: '{server.url}'}}", "['true']"))
        assert ran.status == 0
        assert ran.stderr.count("the webhook of `notify` was not delivered: the server answered 500") == 1
        assert ran.report["outcome"] == "succeeded"

    def test_a_stalled_run_notifies_the_stall_and_then_the_failure(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        with serving() as server:
            spec = write_spec(
                tmp_path, f"{{webhook: '{server.url}'}}", "[sleep, '600']", more="timeouts: {stall_s: 1}\n"
            )
            ran = distlaunch("up", "--no-check", spec)
        assert ran.status == 3, ran.stderr
        assert [(said["event"], said["reference"]) for said in server.said] == [
            ("stalled", "stalled"),
            ("failed", "stalled"),
        ]

    def test_a_run_that_cannot_start_is_notified_as_a_failure(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        with serving() as server:
            spec = write_spec(tmp_path, f"{{webhook: '{server.url}'}}", "['true']")
            ran = distlaunch("up", "--no-check", "--python", "/bin/true", spec)
        assert ran.status == 3
        assert [(said["event"], said["reference"]) for said in server.said] == [("failed", "node-unreachable")]

    def test_plan_and_up_never_print_the_webhook_url(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        spec = write_spec(tmp_path, "{webhook: 'https://127.0.0.1/sesame'}")
        shown = [distlaunch("plan", *flags, spec, run_dir=False) for flags in ([], ["--json"])]
        shown.append(distlaunch("up", "--dry-run", spec))
        assert [ran.status for ran in shown] == [0, 0, 0]
        spec = write_spec(tmp_path, "{webhook_from: HOOK}")
        shown.append(distlaunch("up", "--set", "notify={webhook: sesame sesame}", spec, env={"HOOK": "http://h/"}))
        assert "--set notify: notify.webhook: is not the URL of a web server" in shown[-1].stderr
        assert "sesame" not in "".join(ran.stdout + ran.stderr for ran in shown)

    def test_the_webhook_variable_is_checked_before_anything_starts(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        spec = write_spec(tmp_path, "{webhook_from: MY_HOOK}", "['true']")
        missing = distlaunch("up", "--no-check", spec)
        assert (missing.status, missing.directory.exists()) == (2, False)
        assert "spec.yaml:3:24 notify.webhook_from: MY_HOOK is not set in this environment" in missing.stderr
        wrong = distlaunch("up", "--no-check", spec, env={"MY_HOOK": "sesame"})
        assert (wrong.status, wrong.directory.exists()) == (2, False)
        assert "notify.webhook_from: MY_HOOK is not the URL of a web server [usage]" in wrong.stderr
        assert "sesame" not in wrong.stderr
        with serving() as server:
            ran = distlaunch("up", "--no-check", spec, env={"MY_HOOK": f"{server.url}\n"})
        assert ran.status == 0
        assert [said["event"] for said in server.said] == ["succeeded"]

    def test_a_resumed_run_takes_the_webhook_url_from_the_environment(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        with serving() as server:
            first = distlaunch("up", "--no-check", write_spec(tmp_path, f"{{webhook: '{server.url}'}}"))
            without = distlaunch("resume", str(first.directory), run_dir=False)
            again = distlaunch("resume", str(first.directory), run_dir=False, env={"DISTLAUNCH_WEBHOOK": server.url})
        assert without.status == 2
        assert "notify.webhook_from: DISTLAUNCH_WEBHOOK is not set in this environment [usage]" in without.stderr
        assert (again.status, again.report["attempts"][-1]["attempt"]) == (1, 2)
        assert [said["attempt"] for said in server.said] == [1, 2]

    def test_a_background_run_sends_notifications(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        spec = write_spec(tmp_path, "{command: [sh, -c, 'cat > told.json']}", "[sh, -c, 'sleep 1; exit 3']")
        assert distlaunch("up", "-d", "--no-check", spec).status == 0
        told = tmp_path / "told.json"
        wait_until(lambda: told.exists() and told.read_text().endswith("}"), "the command has run")
        assert json.loads(told.read_text())["event"] == "failed"

    def test_a_running_notify_command_is_not_stopped_when_its_run_ends(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        """It is a descendant of the controller, like leftover processes of a task."""
        told = tmp_path / "told"
        script = f"sleep 2; echo $DISTLAUNCH_EVENT > {told}"
        notify = f"{{command: {json.dumps(['sh', '-c', script])}, on: [restarted]}}"
        command = "['sh', '-c', '[ $DISTLAUNCH_ATTEMPT = 2 ]']"
        more = "restart: {max_restarts: 1}\n"
        ran = distlaunch("up", "--no-check", write_spec(tmp_path, notify, command, more=more))
        assert ran.status == 0, ran.stderr
        assert told.read_text() == "restarted\n"
        assert "Warning" not in ran.stderr
        assert "0 processes left on this machine" in ran.stderr

    def test_a_notify_command_failure_is_detected_even_if_sigchld_is_ignored(self, tmp_path: Path) -> None:
        spec = write_spec(tmp_path, "{command: ['false'], on: [failed]}", "['false']")
        command = distlaunch_command("up", "--no-check", "--run-dir", "run", spec)
        ran = subprocess.run(
            ["env", "--ignore-signal=CHLD", *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 1
        assert "the command of `notify` has failed: it ended with status 1" in ran.stderr

    def test_a_hanging_notify_command_is_stopped_after_a_short_delay(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        mark = make_mark()
        words = json.dumps(hanging(mark))
        ran = distlaunch("up", "--no-check", write_spec(tmp_path, f"{{command: {words}}}", "['true']"))
        assert ran.status == 0
        assert "a notification was not delivered: the end of the run waits for 5 s at most" in ran.stderr
        assert "0 processes left on this machine" in ran.stderr
        assert_none_left(mark)


# --- the spec ---


@pytest.mark.parametrize("notify", ["https://sesame", "{webhook: 'ftp://sesame'}", "{webhook: ['https://sesame']}"])
def test_errors_about_notify_in_a_spec_hide_the_webhook_url(notify: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(Path(write_spec(tmp_path, notify)))
    assert len(caught.value.evidence) == 1
    assert "sesame" not in str(caught.value)


def test_a_rendered_spec_replaces_the_webhook_url_with_a_variable() -> None:
    fields = {"webhook": "https://h/sesame", "command": ["a", "--token", "sesame"], "on": ["stalled"]}
    spec = ClusterSpec.model_validate({"nodes": [{"host": "local"}], "notify": fields})
    assert "sesame" not in repr(spec.notify).replace("'--token', 'sesame'", "")
    text = render_spec(spec)
    assert "sesame" not in text
    assert ClusterSpec.model_validate_json(text).notify == NotifySpec(
        webhook_from="DISTLAUNCH_WEBHOOK", command=["a", "--token", "(redacted)"], on=["stalled"]
    )


@pytest.mark.parametrize(
    ("notify", "said"),
    [
        ({"on": ["failed"]}, "notify: names no recipient; add `webhook_from:` or `command:`"),
        (
            {"webhook": "https://h/", "webhook_from": "A"},
            "notify: has both `webhook:` and `webhook_from:`; keep one",
        ),
        ({"command": [""]}, "notify: the first word of `command:` is empty"),
        ({"command": []}, "notify.command: is empty"),
        (
            {"webhook_from": "A", "on": ["failde"]},
            "notify.on[0]: unknown event 'failde'; did you mean `failed`?",
        ),
        ({"webhook_from": "A", "on": []}, "notify.on: is empty"),
        ({"webhook_from": "A-B"}, "notify.webhook_from: 'A-B' is not a valid variable name"),
        ({"webhok": "https://h/sesame"}, "notify.webhok: unknown field; did you mean `webhook`?"),
        ({"webhook": "https://h/ses ame"}, "notify.webhook: is not the URL of a web server; write one like"),
    ],
)
def test_mistakes_in_notify_are_explained(notify: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        ClusterSpec.model_validate({"nodes": [{"host": "local"}], "notify": notify})
    [line] = explain_fields(caught.value)  # type: ignore[arg-type]
    assert line.startswith(said)
    assert "sesame" not in line
