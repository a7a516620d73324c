"""A terminal small enough to read: what moa_chat.terminal.renderer writes, as rows of characters and styles."""

from __future__ import annotations

import re

from moa_chat.terminal.renderer import char_width

_TOKEN = re.compile(r"\x1b\[(\?)?([0-9;]*)([A-Za-z])|.", re.DOTALL)


class AnsiScreen:
    """Like a terminal it wraps when a character comes that has no room any more, and scrolls at the bottom.

    Attributes:
        rows: all rows since the start, those that have scrolled out too; cells are ``(text, style)``.
    """

    def __init__(self, columns: int, height: int) -> None:
        self.columns, self.height = columns, height
        self.rows: list[list[tuple[str, str]]] = [[] for _ in range(height)]
        self.top = 0  # index of the screen's first row
        self.row = self.column = 0
        self.style, self.wraps, self.cursor_shown = "", True, True

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def write(self, text: str) -> None:
        for private, numbers, final in (
            m.groups() if m[0][0] == "\x1b" else ("", m[0], "") for m in _TOKEN.finditer(text)
        ):
            if not final:
                self._character(numbers)
            elif private:
                self.wraps = final == "h" if numbers == "7" else self.wraps
                self.cursor_shown = final == "h" if numbers == "25" else self.cursor_shown
            elif final == "A":
                self.row = max(self.row - int(numbers or 1), self.top)
            elif final == "m":
                self.style = "" if numbers == "0" else numbers
            elif final == "K":
                self._cut()
            elif final == "J":
                self._cut()
                self.rows[self.row + 1 :] = [[] for _ in self.rows[self.row + 1 :]]
            else:
                raise AssertionError(f"an escape sequence this screen does not know: {final!r}")

    def text(self) -> list[str]:
        """All rows, without the blank ones at the end."""
        lines = ["".join(text for text, _ in row).rstrip() for row in self.rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def styled(self, style: str) -> str:
        """Everything drawn in a style."""
        return "".join(text for row in self.rows for text, of_cell in row if of_cell == style)

    def _character(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self._next_row()
        elif ord(char) < 32:
            raise AssertionError(f"a control character reached the terminal: {char!r}")
        elif not (width := char_width(char)):
            row = self.rows[self.row]
            row[self.column - 1] = (row[self.column - 1][0] + char, self.style)
        else:
            if self.column + width > self.columns:
                if not self.wraps:
                    return
                self._next_row()
            row = self.rows[self.row]
            row += [(" ", "")] * (self.column - len(row))
            row[self.column : self.column + width] = [(char, self.style), *[("", self.style)] * (width - 1)]
            self.column += width

    def _next_row(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == self.top + self.height:
            self.top += 1
            self.rows.append([])

    def _cut(self) -> None:
        del self.rows[self.row][self.column :]
