"""Characters that text of other parties may have, and that no terminal or log line may get."""

from __future__ import annotations

CONTROLS = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0))))
SEQUENCES = "\x1b[2J\x1b[1;31m\x1b]0;title\x07\x1b]52;c;aGk=\x1b\\\x9b2J\x90q\x9c"
BIDIRECTIONAL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
ZERO_WIDTH = "\xad\u034f\u115f\u1160\u180b\u180e\u200b\u200c\u200d\u2060\u2064\u3164\ufe0f\ufeff"
OTHERS = "\u2028\u2029\udfff\ud800\ue000\U000e0041\U000e0100\U0010ffff"
FORGED = "\n2026-01-01T00:00:00.000Z INFO    qdo[1] forged\nqdo: forged"
HOSTILE = f"<{CONTROLS}{SEQUENCES}{BIDIRECTIONAL}{ZERO_WIDTH}{OTHERS}>{FORGED}"
TEXT = HOSTILE.encode(errors="ignore").decode()
"""Without surrogates, which databases and pytest cannot store."""
HOSTILE_NAME = f"<{BIDIRECTIONAL}{ZERO_WIDTH}>"
"""Characters that the name of a queue may have."""


def unsafe(text: str) -> set[str]:
    """Return the characters of an output that could control or deceive a terminal."""
    return {*text} & {*CONTROLS, *SEQUENCES, *BIDIRECTIONAL, *ZERO_WIDTH, *OTHERS} - {
        each for each in "\n" + SEQUENCES if each == "\n" or each.isprintable()
    }
