"""Captures a profile of a cluster's tasks through the profiler service of their TensorFlow servers.

TensorFlow's own client (2.21) drops the options that it gets, and without these options a worker may crash. So this
module sends the requests itself; it needs gRPC, but not TensorFlow.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from typing import Any

ATTEMPTS = 5
"""A task that only waited for others has an empty profile; then all tasks are profiled again, together."""

GATHER_S = 60.0
"""How long a task may take to write its profile after the duration has passed."""

MAX_EVENTS = 1_000_000  # the number that TensorFlow's own client uses

_INTEGER, _TRUTH, _TEXT, _MESSAGE = 4, 8, 9, 11  # FieldDescriptorProto.Type of protocol buffers
_MESSAGES = {
    # The fields used here of TensorFlow's profiler_service.proto, which is not shipped, and of profiler_options.proto.
    "Options": {
        "include_dataset_ops": (1, _TRUTH),
        "host_tracer_level": (2, _INTEGER),
        "device_tracer_level": (3, _INTEGER),
        "python_tracer_level": (4, _INTEGER),
        "version": (5, _INTEGER),
        "enable_hlo_proto": (7, _TRUTH),
        "duration_ms": (9, _INTEGER),
    },
    "Request": {
        "duration_ms": (1, _INTEGER),
        "max_events": (2, _INTEGER),
        "opts": (4, _MESSAGE),
        "repository_root": (5, _TEXT),
        "session_id": (6, _TEXT),
        "host_name": (7, _TEXT),
    },
    "Response": {"empty_trace": (7, _TRUTH)},
}


def main() -> None:
    """Reads `{"tasks": {NAME: {"address": HOST:PORT, "operations": BOOL}}, "directory": …, "duration_s": …}`.

    Prints as its last line `{"directory": …, "silent": [NAME], "failed": {NAME: REASON}}`: the folder with each task's
    NAME.xplane.pb, the tasks whose profile is empty, and the tasks whose request failed.
    """
    order = json.load(sys.stdin)
    session = time.strftime("%Y_%m_%d_%H_%M_%S")
    root = f"{order['directory']}/plugins/profile"
    messages = _make_messages()
    for _ in range(ATTEMPTS):
        silent, failed = _ask_all(messages, order, root, session)
        if failed or not silent:
            break
    answer = {"directory": f"{root}/{session}", "silent": silent, "failed": failed}
    print(f"\n{json.dumps(answer)}", flush=True)


def _ask_all(
    messages: dict[str, Any], order: dict[str, Any], root: str, session: str
) -> tuple[list[str], dict[str, str]]:
    """Profiles all tasks at the same time; overwrites earlier profiles of the session."""
    grpc: Any = importlib.import_module("grpc")
    duration_ms = int(order["duration_s"] * 1000)
    silent, failed, asked = [], {}, {}
    with contextlib.ExitStack() as channels:
        for name, task in order["tasks"].items():
            channel = grpc.insecure_channel(task["address"], options=[("grpc.enable_http_proxy", 0)])
            ask = channels.enter_context(channel).unary_unary(
                "/tensorflow.ProfilerService/Profile",
                request_serializer=messages["Request"].SerializeToString,
                response_deserializer=messages["Response"].FromString,
            )
            options = messages["Options"](
                version=1,
                duration_ms=duration_ms,
                include_dataset_ops=True,
                enable_hlo_proto=True,
                device_tracer_level=1,
                python_tracer_level=1,
                host_tracer_level=2 if task["operations"] else 0,
            )
            request = messages["Request"](
                duration_ms=duration_ms,
                max_events=MAX_EVENTS,
                opts=options,
                repository_root=root,
                session_id=session,
                host_name=name,
            )
            asked[name] = ask.future(request, timeout=order["duration_s"] + GATHER_S)
        for name, answer in asked.items():
            try:
                if answer.result().empty_trace:
                    silent.append(name)
            except grpc.RpcError as error:
                failed[name] = error.details()
    return silent, failed


def _make_messages() -> dict[str, Any]:
    """The classes of the messages, by the names in `_MESSAGES`."""
    descriptors: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    pools: Any = importlib.import_module("google.protobuf.descriptor_pool")
    factory: Any = importlib.import_module("google.protobuf.message_factory")
    file = descriptors.FileDescriptorProto(name="distlaunch/profile.proto", package="distlaunch", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            whose = ".distlaunch.Options" if kind == _MESSAGE else None
            message.field.add(name=field, number=number, type=kind, type_name=whose, label=1)
    pool = pools.DescriptorPool()
    pool.Add(file)
    return {name: factory.GetMessageClass(pool.FindMessageTypeByName(f"distlaunch.{name}")) for name in _MESSAGES}
