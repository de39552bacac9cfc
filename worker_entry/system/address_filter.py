"""Compiles addresses into a classic BPF program that checks whether a packet's source address is one of them.

The program sees a packet from its transport header on; the network header is at negative offsets. A conditional jump
only goes forward and skips at most 255 instructions, so the two endings are repeated every few hundred instructions.
See `Documentation/networking/filter.rst` of Linux.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Sequence
from typing import Union

Network = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

LIMIT = 4096
"""The maximum number of instructions that the kernel accepts."""

_LOAD_WORD, _LOAD_BYTE, _AND, _SHIFT_RIGHT, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x74, 0x05, 0x15, 0x06
_NETWORK_HEADER = (1 << 32) - (1 << 20)
_IPV4_SOURCE, _IPV6_SOURCE = 12, 8
_INTERFACE = (1 << 32) - 0x1000 + 8
"""SKF_AD_IFINDEX: the index of the interface through which the packet came."""
_FURTHEST = 255
_ALL = 0xFFFFFFFF

_Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""
_Entry = tuple[tuple[int, ...], int]
"""The words of a network's address, and the length of its prefix."""


class TooManyError(ValueError):
    """The addresses do not fit into one program."""


def compile_filter(networks: Iterable[Network], scoped: Iterable[ipaddress.IPv6Address] = ()) -> bytes:
    """Returns the program, an array of `struct sock_filter`: it returns 1 for a source address in a network, else 0.

    An IPv6 network of mapped IPv4 addresses stands for the IPv4 addresses.

    Args:
        networks: addresses that may come through any interface.
        scoped: addresses that mean something on one interface only; their scope is its index.

    Raises:
        TooManyError: the program would be longer than the kernel accepts.
    """
    by_version: dict[int, list[Network]] = {4: [], 6: []}
    for network in map(_unmapped, networks):
        by_version[network.version].append(network)
    sixes = [*_match_scoped(scoped), *_match(_entries(by_version[6]), 0, _IPV6_SOURCE)]
    fours = _match(_entries(by_version[4]), 0, _IPV4_SOURCE)
    program = [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_IF_EQUAL, 1, 0, 6),
        (_JUMP, 0, 0, len(sixes)),
        *sixes,
        *fours,
    ]
    if len(program) > LIMIT:
        raise TooManyError(f"a filter of {len(program):,} instructions; the kernel accepts {LIMIT:,}")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _match_scoped(addresses: Iterable[ipaddress.IPv6Address]) -> list[_Instruction]:
    """Makes code that returns 1 for these addresses, each from its own interface, and continues otherwise."""
    code: list[_Instruction] = []
    for address in addresses:
        words = struct.unpack("!4I", address.packed)
        tests = [(_NETWORK_HEADER + _IPV6_SOURCE + 4 * at, word) for at, word in enumerate(words)]
        tests.append((_INTERFACE, int(address.scope_id or 0)))
        for number, (place, value) in enumerate(tests):
            left = 2 * (len(tests) - number) - 1  # past the rest and the ending
            code += [(_LOAD_WORD, 0, 0, place), (_JUMP_IF_EQUAL, 0, left, value)]
        code.append((_RETURN, 0, 0, 1))
    return code


def _unmapped(network: Network) -> Network:
    mapped = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    if mapped is None or network.prefixlen < 96:
        return network
    return ipaddress.IPv4Network((int(mapped), network.prefixlen - 96))


def _entries(networks: Sequence[Network]) -> list[_Entry]:
    found = []
    for network in ipaddress.collapse_addresses(networks):  # type: ignore[type-var]  # all have the same version
        packed = network.network_address.packed
        found.append((struct.unpack(f"!{len(packed) // 4}I", packed), network.prefixlen))
    return found


def _match(entries: Sequence[_Entry], depth: int, source: int) -> list[_Instruction]:
    """Makes code that always returns, for entries whose words before `depth` are equal; no entry contains another."""
    if any(length <= 32 * depth for _, length in entries):
        return [(_RETURN, 0, 0, 1)]
    ending: dict[int, list[int]] = {}
    deeper: dict[int, list[_Entry]] = {}
    for words, length in entries:
        if length <= 32 * (depth + 1):
            ending.setdefault(_mask(length - 32 * depth), []).append(words[depth])
        else:
            deeper.setdefault(words[depth], []).append((words, length))
    load = (_LOAD_WORD, 0, 0, _NETWORK_HEADER + source + 4 * depth)
    code: list[_Instruction] = []
    for mask in sorted(ending):  # the whole word comes last: its mask does not change the loaded word
        code += [load, *([(_AND, 0, 0, mask)] if mask != _ALL else ()), *_return_if_any(ending[mask])]
    if _ALL not in ending and deeper:
        code.append(load)
    code += _return_if_single([(value, below[0]) for value, below in deeper.items() if len(below) == 1], depth, source)
    for value, below in deeper.items():
        if len(below) > 1:
            body = _match(below, depth + 1, source)
            code += [(_JUMP_IF_EQUAL, 1, 0, value), (_JUMP, 0, 0, len(body)), *body]
    return [*code, (_RETURN, 0, 0, 0)]


def _mask(bits: int) -> int:
    return _ALL & (_ALL << (32 - bits))


def _return_if_any(values: Sequence[int]) -> list[_Instruction]:
    """Makes code that returns 1 if the word is one of these values, and continues otherwise."""
    code: list[_Instruction] = []
    for start in range(0, len(values), _FURTHEST):
        chunk = values[start : start + _FURTHEST]
        code += [(_JUMP_IF_EQUAL, len(chunk) - index, 0, value) for index, value in enumerate(chunk)]
        code += [(_JUMP, 0, 0, 1), (_RETURN, 0, 0, 1)]
    return code


def _return_if_single(entries: Sequence[tuple[int, _Entry]], depth: int, source: int) -> list[_Instruction]:
    """Makes code that decides for each word at `depth` that only one entry has, and continues for all other words."""
    code: list[_Instruction] = []
    pending: list[list[_Instruction]] = []
    """The code of entries whose jumps to the two endings are still placeholders (`_ACCEPT`, `_REJECT`)."""

    def flush() -> None:
        flat = [instruction for each in pending for instruction in each]
        for index, (operation, if_true, if_false, operand) in enumerate(flat):
            left = len(flat) - index  # to the first ending, past the jump that skips both endings
            flat[index] = (
                operation,
                left if if_true == _ACCEPT else if_true,
                left + 1 if if_false == _REJECT else if_false,
                operand,
            )
        code.extend(flat)
        code.extend([(_JUMP, 0, 0, 2), (_RETURN, 0, 0, 1), (_RETURN, 0, 0, 0)] if flat else ())
        pending.clear()

    for value, (words, length) in entries:
        rest: list[_Instruction] = []
        for at in range(depth + 1, -(-length // 32)):
            mask = _mask(min(length - 32 * at, 32))
            rest.append((_LOAD_WORD, 0, 0, _NETWORK_HEADER + source + 4 * at))
            rest += [(_AND, 0, 0, mask)] if mask != _ALL else []
            rest.append((_JUMP_IF_EQUAL, 0, _REJECT, words[at]))
        operation, _, if_false, operand = rest[-1]
        rest[-1] = (operation, _ACCEPT, if_false, operand)
        if sum(map(len, pending)) + len(rest) + 1 >= _FURTHEST:
            flush()
        pending.append([(_JUMP_IF_EQUAL, 0, len(rest), value), *rest])
    flush()
    return code


_ACCEPT, _REJECT = -1, -2
"""Placeholders for jumps to an ending whose position is not known yet."""
