"""How the user's ssh configuration reaches a host: the settings that `ssh HOST` would use, as values.

Where OpenSSH is installed, `ssh -G` answers: only OpenSSH knows all of Include, Match and the system's files.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import paramiko

from launcher import helpers
from launcher.transports.base import LinkError
from worker_entry.protocol.frozen import dataclass, replace
from worker_entry.system import kernel

NONE = ("none", "")
HASHED = "ControlPath"
CHECKS = {"revokedhostkeys": "RevokedHostKeys", "knownhostscommand": "KnownHostsCommand"}
"""Options that decide on host keys besides known_hosts files, as `ssh -G` and the manual write them."""
ANSWER_S = 30.0
"""How long `ssh -G` may take; it only reads files and runs the commands of `Match exec`."""
_TOKEN = re.compile(r"%(.)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
FAST_CIPHERS = ("aes128-gcm", "aes256-gcm")
"""CPUs have instructions for them."""


@dataclass(frozen=True)
class SshTarget:
    """Where and how to connect. `host` is from the spec; the connection goes to `hostname` and `port`."""

    host: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    identity_agent: str | None
    """The ssh-agent's socket; None: that of SSH_AUTH_SOCK; empty: no ssh-agent."""
    known_hosts: tuple[Path, ...]
    host_key_alias: str | None
    proxy_command: str | None
    pkcs11: bool = False
    """Whether keys are on a smart card."""
    ciphers: tuple[str, ...] = ()
    """In the order of preference; empty if OpenSSH was not asked."""
    delegates: bool = False
    """Whether the node would get the user's Kerberos credentials; builds without GSSAPI do not know the option."""
    other_checks: tuple[str, ...] = ()
    """The options with which the user lets OpenSSH find or revoke host keys elsewhere than in known_hosts files."""

    def cipher_options(self) -> list[str]:
        """The ciphers as an option of `ssh`, the fast ones first: its own first choice takes 1.4 × the CPU time."""
        ciphers = sorted(self.ciphers, key=lambda name: not name.startswith(FAST_CIPHERS))
        return [f"Ciphers={','.join(ciphers)}"] if ciphers else []

    @property
    def key_name(self) -> str:
        """The host's name in known_hosts files."""
        name = self.host_key_alias or self.hostname
        return name if self.host_key_alias else name.lower() if self.port == 22 else f"[{name.lower()}]:{self.port}"

    @property
    def plain_name(self) -> str:
        """The name under which the host's key also counts if no line names the host with its port; empty if none."""
        return "" if self.port == 22 or self.host_key_alias else self.hostname.lower()


@dataclass(frozen=True)
class SshOverrides:
    """Settings that override the configuration; None keeps the configuration's."""

    user: str | None = None
    hostname: str | None = None
    port: int | None = None
    identity_file: str | None = None
    known_hosts_file: str | None = None
    proxy_jump: str | None = None

    def options(self) -> list[str]:
        """The settings as options of `ssh`, which take precedence over its configuration."""
        given = {
            "User": self.user,
            "HostName": self.hostname,
            "Port": self.port,
            "IdentityFile": self.identity_file,
            # An ssh-agent with many keys would use up sshd's attempts before this key's turn.
            "IdentitiesOnly": None if self.identity_file is None else "yes",
            "ProxyJump": self.proxy_jump,
        }
        return [f"{name}={value}" for name, value in given.items() if value is not None]

    def known_hosts_options(self) -> list[str]:
        """The options for where `ssh` looks up host keys."""
        if self.known_hosts_file is None:
            return []
        return [f'UserKnownHostsFile="{self.known_hosts_file}"', "GlobalKnownHostsFile=none"]


def load_target(host: str, overrides: SshOverrides | None = None) -> SshTarget:
    """The effective configuration for a host.

    Raises:
        LinkError: the configuration cannot be read.
    """
    overrides = overrides or SshOverrides()
    target = _load_configured(host, overrides.options())
    if overrides.known_hosts_file is None:
        return target
    # Not as an option: OpenSSH prints several names without quotes, so that a space in one is ambiguous.
    tokens = _make_tokens(host, target.hostname, target.port, target.user, target.host_key_alias or "", "")
    return replace(target, known_hosts=(_path(overrides.known_hosts_file, tokens),))


def _load_configured(host: str, options: Sequence[str]) -> SshTarget:
    if shutil.which("ssh") is not None:
        return parse_target(host, _ask_openssh(host, options))
    path = Path.home() / ".ssh" / "config"
    try:
        config = paramiko.SSHConfig.from_path(str(path)) if path.exists() else paramiko.SSHConfig()
        values = config.lookup(host.rpartition("@")[2])
    except (OSError, paramiko.ConfigParseError) as error:
        raise LinkError(f"cannot read {path}: {error}") from None
    lines = [option.replace("=", " ", 1) for option in options]
    lines += [f"user {host.rpartition('@')[0]}"] if "@" in host else []
    for key, value in values.items():
        lines += [f"{key} {item}" for item in ([value] if isinstance(value, str) else value)]
    return parse_target(host, "\n".join(lines))


def as_words(options: Iterable[str]) -> list[str]:
    """The options as words of a command line of OpenSSH's programs."""
    return [word for option in options for word in ("-o", option)]


def _ask_openssh(host: str, options: Iterable[str]) -> str:
    # OpenSSH expands this option in its answer, and alone knows what its version hashes for `%C`.
    options = [*options, f"{HASHED}=%C"]
    command = ["ssh", "-G", *as_words(options), "--", host]
    try:
        process: subprocess.Popen[bytes] = helpers.start(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise LinkError(f"`ssh -G` cannot be started: {error.strerror}") from None
    with process:
        try:
            output, errors = process.communicate(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            for below in kernel.descendants(process.pid):
                kernel.send_signal(below, signal.SIGKILL)
            process.kill()
            raise LinkError(
                f"`ssh -G {host}` does not answer within {ANSWER_S:g} s; a `Match exec` in its configuration may hang"
            ) from None
    if process.returncode != 0:
        raise LinkError(f"ssh does not accept its configuration: {errors.decode(errors='replace').strip()}")
    try:
        return output.decode()
    except UnicodeDecodeError as error:
        line = output.splitlines()[output[: error.start].count(b"\n")].decode(errors="backslashreplace")
        raise LinkError(f"ssh's configuration of this host is not UTF-8: {line}") from None


def parse_target(host: str, text: str) -> SshTarget:
    """The output of `ssh -G` as a target.

    Raises:
        LinkError: a value is invalid.
    """
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if value:
            values.setdefault(key.lower(), []).append(value)

    def first(key: str, default: str = "") -> str:
        return values.get(key, [default])[0]

    hostname = first("hostname", host.rpartition("@")[2])
    port = _port(first("port", "22"))
    user = first("user") or getpass.getuser()
    tokens = _make_tokens(host, hostname, port, user, first("hostkeyalias"), first(HASHED.lower()))
    # OpenSSH prints names without quotes.
    files = f"{first('userknownhostsfile', '~/.ssh/known_hosts')} {first('globalknownhostsfile')}".split()
    return SshTarget(
        host=host,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=tuple(_path(name, tokens) for name in values.get("identityfile", [])),
        identities_only=first("identitiesonly") == "yes",
        identity_agent=_agent(first("identityagent", "SSH_AUTH_SOCK"), tokens),
        known_hosts=tuple(_path(name, tokens) for name in files if name not in NONE),
        host_key_alias=first("hostkeyalias") or None,
        proxy_command=_proxy_command(first("proxycommand"), first("proxyjump"), hostname, port, tokens),
        pkcs11=first("pkcs11provider", "none") not in NONE,
        ciphers=tuple(first("ciphers").split(",")) if first("ciphers") else (),
        delegates=first("gssapidelegatecredentials") == "yes",
        other_checks=tuple(name for key, name in CHECKS.items() if first(key) not in NONE),
    )


def _make_tokens(host: str, hostname: str, port: int, user: str, alias: str, hashed: str) -> dict[str, str]:
    """The values of the tokens in options; see TOKENS in ssh_config(5)."""
    given, local = host.rpartition("@")[2], socket.gethostname()
    return {
        "%": "%",
        "C": hashed if "%" not in hashed else "",  # an old version does not expand it
        "L": local.partition(".")[0],
        "d": str(Path.home()),
        "h": hostname,
        "i": str(os.getuid()),
        "k": alias or given,
        "l": local,
        "n": given,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
    }


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    """Replaces the tokens; raises LinkError for a token that has no meaning here, as OpenSSH does."""

    def replace_token(found: re.Match[str]) -> str:
        if not tokens.get(found[1]):
            raise LinkError(f"ssh's configuration of this host has {text}, in which {found[0]} has no meaning here")
        return tokens[found[1]]

    return _TOKEN.sub(replace_token, text)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 16:
        raise LinkError(f"ssh's configuration of this host has Port {text}, which is not a port")
    return int(text)


def _agent(name: str, tokens: Mapping[str, str]) -> str | None:
    if name == "SSH_AUTH_SOCK":
        return None
    if name in NONE:
        return ""
    if name.startswith("$") and not name.startswith("${"):
        return os.environ.get(name[1:], "")
    return str(_path(name, tokens)) if _variables(name) is not None else ""


def _path(name: str, tokens: Mapping[str, str]) -> Path:
    text = _variables(name)
    return Path(_expand(name if text is None else text, tokens)).expanduser()


def _variables(text: str) -> str | None:
    """The text with the values of `${NAME}`; None if one of them is not set."""
    names = set(_VARIABLE.findall(text))
    return None if names - os.environ.keys() else _VARIABLE.sub(lambda found: os.environ[found[1]], text)


def _proxy_command(command: str, jump: str, hostname: str, port: int, tokens: Mapping[str, str]) -> str | None:
    if command not in NONE:
        return _expand(command, tokens)
    if jump not in NONE:
        *before, last = jump.split(",")
        through = ["-J", ",".join(before)] if before else []
        name, _, jump_port = last.removeprefix("ssh://").rpartition(":") if last.count(":") == 1 else (last, "", "")
        at = ["-p", jump_port] if jump_port else []
        inner = f"[{hostname}]:{port}"
        return shlex.join(["ssh", "-o", "BatchMode=yes", *through, *at, "-W", inner, "--", name or last])
    return None
