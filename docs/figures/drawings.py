"""Draw the SVG files of the README and of docs/concepts.md.

    python docs/figures/drawings.py

The drawings have no background and follow the light or dark colors of their page. A
drawing shown as an image follows the setting of the reader's system; a drawing inlined
in the site follows the site's switch.
"""

from __future__ import annotations

import heapq
import pathlib
from html import escape

FOLDER = pathlib.Path(__file__).parents[1] / "drawings"

LIGHT = {
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#c4ccd4",
    "worker": "#2f6fde",
    "worker-fill": "#dce8fb",
    "center": "#bc5a00",
    "center-fill": "#fbe6d0",
    "message": "#1a7f5a",
    "wait": "#e4e8ec",
}
DARK = {
    "ink": "#e6edf3",
    "soft": "#9da7b1",
    "line": "#4a5460",
    "worker": "#7db1ff",
    "worker-fill": "#1d3354",
    "center": "#ffb066",
    "center-fill": "#4d2f12",
    "message": "#5fd3a6",
    "wait": "#2b323a",
}


class Drawing:
    """A drawing that collects its parts, in the coordinates of SVG.

    Args:
      name: name of the file, without ``.svg``.
      title: text for screen readers.
      width: width of the drawing, in units; texts are 15 units high.
      height: height of the drawing, in units.
    """

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self.name, self.title, self.size = name, title, (width, height)
        self.parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, kind: str, *, round_: float = 6
    ) -> None:
        """Add a box; ``kind`` is "worker", "center", "wait" or "frame"."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round_:g}" '
            f'class="{kind}"/>'
        )

    def label(self, x: float, y: float, words: str, kind: str = "") -> None:
        """Add a line of text that begins at a point."""
        self.text(x, y, words, kind, anchor="start")

    def text(
        self, x: float, y: float, words: str, kind: str = "", *, anchor: str = "middle"
    ) -> None:
        """Add a line of text, centered on a point unless ``anchor`` says otherwise.

        ``kind`` is any of "soft", "bold", "small" and "mono", separated by spaces.
        """
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">'
            f"{escape(words)}</text>"
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, kind: str = "message"
    ) -> None:
        """Add an arrow; ``kind`` is "message", "adopt" or "plain"."""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="arrow {kind}" '
            f'marker-end="url(#{self.name}-{kind})"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "") -> None:
        """Add a line without an arrowhead; it is dashed if ``kind`` is "dash"."""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="line {kind}"/>'
        )

    def dot(self, x: float, y: float, kind: str, r: float = 4) -> None:
        """Add a disc in the color of a "worker", a "center" or a "message"."""
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" class="dot {kind}"/>'
        )

    def write(self) -> None:
        """Write the SVG file."""
        width, height = self.size
        svg = f"svg.agn-{self.name}"

        def colors(of: dict[str, str]) -> str:
            return ";".join(f"--{name}:{value}" for name, value in of.items())

        heads = "".join(
            f'<marker id="{self.name}-{kind}" viewBox="0 0 8 8" refX="7" refY="4" '
            f'markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" class="head {kind}"/></marker>'
            for kind in ("message", "adopt", "plain")
        )
        style = [
            f"{svg}{{{colors(LIGHT)};width:100%;max-width:{width}px;height:auto}}",
            f"@media(prefers-color-scheme:dark){{{svg}{{{colors(DARK)}}}}}",
            f"html[data-theme=light] {svg}{{{colors(LIGHT)}}}",
            f"html[data-theme=dark] {svg}{{{colors(DARK)}}}",
            f"{svg} text{{font:15px system-ui,sans-serif;fill:var(--ink)}}",
            f"{svg} .soft{{fill:var(--soft)}}",
            f"{svg} .small{{font-size:13px}}",
            f"{svg} .bold{{font-weight:600}}",
            f"{svg} .mono{{font-family:ui-monospace,monospace;font-size:13px}}",
            f"{svg} rect{{stroke-width:1.5}}",
            f"{svg} .worker{{fill:var(--worker-fill);stroke:var(--worker)}}",
            f"{svg} .center{{fill:var(--center-fill);stroke:var(--center)}}",
            f"{svg} .wait{{fill:var(--wait);stroke:var(--line);stroke-width:1}}",
            f"{svg} .frame{{fill:none;stroke:var(--line)}}",
            f"{svg} .line{{fill:none;stroke:var(--line);stroke-width:1.5}}",
            f"{svg} .dash{{stroke-dasharray:4 4}}",
            f"{svg} .arrow{{fill:none;stroke-width:2}}",
            f"{svg} .arrow.message{{stroke:var(--message)}}",
            f"{svg} .arrow.adopt{{stroke:var(--center)}}",
            f"{svg} .arrow.plain{{stroke:var(--soft)}}",
            f"{svg} .head.message{{fill:var(--message)}}",
            f"{svg} .head.adopt{{fill:var(--center)}}",
            f"{svg} .head.plain{{fill:var(--soft)}}",
            f"{svg} .dot{{stroke:none}}",
            f"{svg} .dot.worker{{fill:var(--worker)}}",
            f"{svg} .dot.center{{fill:var(--center)}}",
            f"{svg} .dot.message{{fill:var(--message)}}",
        ]
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'class="agn-{self.name}" role="img" aria-label="{escape(self.title)}">'
        )
        lines = [
            head,
            "<style>",
            *style,
            "</style>",
            f"<defs>{heads}</defs>",
            *self.parts,
            "</svg>",
        ]
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{self.name}.svg").write_text("\n".join(lines) + "\n")


def what_and_why() -> None:
    """Draw the README's comparison: when workers communicate and when they wait."""
    d = Drawing(
        "what",
        "Data-parallel workers wait for the network at every step; workers of "
        "agn_optax make a period of local steps and then exchange one message with "
        "the center",
        760,
        386,
    )
    left, right = 118, 744
    d.label(
        16, 24, "Data parallel: everybody waits for everybody, at every step", "bold"
    )
    for worker in range(3):
        y = 40 + worker * 30
        d.label(16, y + 16, f"worker {worker}", "soft")
        x = left
        while x < right:
            d.rect(x, y, 12, 22, "worker", round_=3)
            d.rect(x + 14, y, min(86, right - x - 14), 22, "wait", round_=3)
            x += 104
    for i in range(1, 7):
        x = left + 104 * i - 3
        d.line(x, 38, x, 124)
    d.label(left, 146, "gradients of the whole model cross the network", "soft small")

    top = 190
    d.label(16, top, "agn_optax: workers make local steps and talk rarely", "bold")
    d.label(16, top + 34, "center", "soft")
    d.rect(left, top + 16, right - left, 26, "center")
    meets = {0: (322, 552), 1: (398, 682), 2: (272, 452, 632)}
    for worker, ends in meets.items():  # drawn first, to lie behind the steps
        for end in ends:
            y = top + 78 + worker * 30
            d.arrow(end - 1, y + 20, end - 1, top + 44)
            d.arrow(end + 6, top + 44, end + 6, y + 20, "adopt")
    for worker, ends in meets.items():
        y = top + 78 + worker * 30
        d.label(16, y + 16, f"worker {worker}", "soft")
        begin = left
        for end in (*ends, right):
            x = begin
            while x + 12 <= end - 4:
                d.rect(x, y, 12, 22, "worker", round_=3)
                x += 14
            begin = end + 10
    d.dot(left + 5, top + 182, "message")
    d.label(left + 16, top + 187, "a message, once a period", "soft small")
    d.dot(left + 205, top + 182, "center")
    d.label(left + 216, top + 187, "the worker adopts the center", "soft small")
    d.rect(left + 424, top + 175, 12, 14, "worker", round_=3)
    d.label(left + 442, top + 187, "a local step", "soft small")
    d.rect(left + 538, top + 175, 12, 14, "wait", round_=3)
    d.label(left + 556, top + 187, "waiting", "soft small")
    d.write()


def one_round() -> None:
    """Draw a period of local steps and the exchange that ends it."""
    d = Drawing(
        "round",
        "A round: the worker makes a period of local steps from the anchor, sends a "
        "message to the center, the center optimizer moves the center, and the worker "
        "adopts it",
        720,
        330,
    )
    d.label(16, 46, "center", "bold")
    d.label(16, 206, "worker", "bold")
    d.rect(96, 20, 74, 44, "center")
    d.text(133, 47, "c")
    d.line(170, 42, 430, 42, "dash")
    d.rect(430, 20, 160, 44, "center")
    d.text(510, 47, "center optimizer")
    d.arrow(590, 42, 626, 42, "plain")
    d.rect(630, 20, 74, 44, "center")
    d.text(667, 47, "c'")
    d.arrow(133, 66, 133, 176, "adopt")
    d.label(144, 118, "adopt: the anchor a", "soft small")
    d.rect(96, 180, 74, 44, "worker")
    d.text(133, 207, "x = a")
    for i in range(4):
        x = 178 + 58 * i
        d.rect(x, 188, 44, 28, "worker", round_=4)
        d.text(x + 22, 207, "…" if i == 2 else f"g{'₁₂ λ'[i] if i != 3 else 'λ'}")
    d.text(288, 250, "period: λ local steps of the inner optimizer", "soft small")
    d.text(288, 270, "record: what the rule keeps of them", "soft small")
    d.rect(412, 180, 84, 44, "worker")
    d.text(454, 207, "x")
    d.arrow(470, 178, 500, 68)
    d.label(496, 128, "message m", "small")
    d.label(496, 146, "of record, x, a", "soft small")
    d.arrow(667, 66, 667, 176, "adopt")
    d.text(656, 118, "adopt", "soft small", anchor="end")
    d.rect(630, 180, 74, 44, "worker")
    d.text(667, 207, "x ← c'")
    d.line(96, 296, 704, 296)
    for x in (96, 704):
        d.line(x, 290, x, 302)
    d.text(400, 318, "one round", "soft")
    d.write()


def four_ways() -> None:
    """Draw four setups: the place of the center, and the kind of its workers."""
    d = Drawing(
        "ways",
        "Four ways: one optimizer, towers on a mesh, an embedded center, and a served "
        "center",
        720,
        560,
    )

    def panel(
        column: int, row: int, title: str, code: str, note: str
    ) -> tuple[int, int]:
        x, y = 10 + column * 356, 8 + row * 280
        d.rect(x, y, 344, 264, "frame", round_=10)
        d.label(x + 16, y + 28, title, "bold")
        d.label(x + 16, y + 50, code, "mono soft")
        d.text(x + 172, y + 248, note, "soft small")
        return x, y

    x, y = panel(
        0,
        0,
        "1  One optimizer",
        "agn_optax.agn(adam, period=10)",
        "one program; any optax loop",
    )
    d.rect(x + 92, y + 76, 160, 140, "frame")
    d.text(x + 172, y + 98, "train step", "soft small")
    d.rect(x + 112, y + 112, 120, 36, "worker")
    d.text(x + 172, y + 135, "worker x")
    d.rect(x + 112, y + 166, 120, 36, "center")
    d.text(x + 172, y + 189, "center c")

    x, y = panel(
        1,
        0,
        "2  Towers on a mesh",
        "agn_optax.Towers(workers=2)",
        "one program, many devices; they meet in rounds",
    )
    for worker in range(2):
        left = x + 20 + worker * 156
        d.rect(left, y + 70, 148, 84, "frame")
        d.text(left + 74, y + 88, f"worker {worker}", "soft small")
        for tower in range(2):
            d.rect(left + 10 + tower * 66, y + 98, 62, 42, "worker")
            d.text(left + 41 + tower * 66, y + 124, "tower")
        d.arrow(left + 74, y + 156, left + 74, y + 180)
    d.rect(x + 20, y + 184, 304, 34, "center")
    d.text(x + 172, y + 206, "center: whole, in shards, or on the host")

    x, y = panel(
        0,
        1,
        "3  Embedded center",
        "agn_optax.LocalCenter(rule)",
        "one process; threads come and go",
    )
    d.rect(x + 20, y + 66, 304, 160, "frame")
    d.rect(x + 102, y + 78, 140, 36, "center")
    d.text(x + 172, y + 101, "center")
    for worker in range(3):
        left = x + 34 + worker * 96
        d.rect(left, y + 170, 84, 40, "worker")
        d.text(left + 42, y + 195, f"worker {worker}", "small")
        d.arrow(left + 36, y + 168, x + 142 + worker * 30, y + 118)

    x, y = panel(
        1,
        1,
        "4  Served center",
        "service.serve / service.connect",
        "processes and hosts; they come, crash and return",
    )
    d.rect(x + 92, y + 66, 160, 52, "frame")
    d.rect(x + 102, y + 74, 140, 36, "center")
    d.text(x + 172, y + 97, "center")
    for worker in range(3):
        left = x + 20 + worker * 106
        d.rect(left, y + 162, 92, 60, "frame")
        d.rect(left + 6, y + 174, 80, 36, "worker")
        d.text(left + 46, y + 197, f"worker {worker}", "small")
        d.arrow(left + 42, y + 158, x + 142 + worker * 30, y + 122)
    d.label(x + 260, y + 88, "gRPC, TCP,", "soft small")
    d.label(x + 260, y + 104, "memory", "soft small")
    d.write()


def asynchronous() -> None:
    """Draw a timeline of workers with different speeds, and their staleness."""
    d = Drawing(
        "asynchronous",
        "A timeline of three asynchronous workers: each message makes a new version of "
        "the center, and its staleness is the number of versions made since that "
        "worker last adopted the center",
        760,
        330,
    )
    left, right, top = 110, 748, 56
    rounds = {0: 118, 1: 152, 2: 335}  # duration of a period of each worker
    d.label(16, top + 5, "center", "bold")
    d.line(left, top, right, top)
    for worker in rounds:
        y = 130 + worker * 62
        d.label(16, y + 20, f"worker {worker}", "bold")
        d.label(16, y + 36, ("fast", "", "slow")[worker], "soft small")
        d.line(left, y + 14, right, y + 14)
    queue = [(left + length, worker) for worker, length in rounds.items()]
    heapq.heapify(queue)
    version, anchors = 0, dict.fromkeys(rounds, 0)
    begins = dict.fromkeys(rounds, left)
    boxes = []
    d.dot(left, top, "center", 6)
    d.text(left, top - 16, "v0", "small")
    while queue and queue[0][0] < right:
        x, worker = heapq.heappop(queue)
        y = 130 + worker * 62
        staleness = version - anchors[worker]
        version += 1
        anchors[worker] = version
        boxes.append((begins[worker], x, y, f"staleness {staleness}"))
        d.arrow(x, y + 12, x, top + 9)
        d.dot(x, top, "center", 6)
        d.text(x, top - 16, f"v{version}", "small")
        begins[worker] = x
        heapq.heappush(queue, (x + rounds[worker], worker))
    for begin, end, y, words in boxes:  # drawn last, to lie before the arrows
        d.rect(begin + 5, y, end - begin - 10, 28, "worker", round_=4)
        d.text((begin + end) / 2, y + 19, words, "small")
    for worker, begin in begins.items():
        y = 130 + worker * 62
        d.rect(begin + 5, y, right - begin - 5, 28, "frame", round_=4)
    d.label(
        left,
        318,
        "Staleness: center updates since this worker's anchor was read.",
        "soft small",
    )
    d.arrow(620, 314, 744, 314, "plain")
    d.text(612, 318, "time", "soft small", anchor="end")
    d.write()


def chart() -> None:
    """Draw the decision chart: which of the four ways, and which rule to try first."""
    d = Drawing(
        "chart",
        "A decision chart: from fast links and equal devices to data parallel towers, "
        "from workers that may wait for each other to workers on a mesh, and else to "
        "an embedded or a served center",
        720,
        470,
    )
    questions = (
        ("Are the devices alike, and", "all links between them fast?"),
        ("May all workers wait for each", "other, and end together?"),
        ("Are they threads", "of one process?"),
    )
    answers = (
        ("Towers()", "data parallel: no rule"),
        ("Towers(workers=n)", "begin with diloco, period 10 to 40"),
        ("LocalCenter, Worker", "begin with dynsgd, or easgd"),
    )
    for i, (question, (code, rule)) in enumerate(zip(questions, answers, strict=True)):
        y = 12 + i * 124
        d.rect(16, y, 290, 72, "frame")
        for j, words in enumerate(question):
            d.text(161, y + 31 + 22 * j, words)
        d.arrow(308, y + 36, 388, y + 36, "plain")
        d.text(346, y + 28, "yes", "soft small")
        d.rect(392, y, 312, 72, "worker")
        d.text(548, y + 30, code, "mono bold")
        d.text(548, y + 53, rule, "small")
        d.arrow(161, y + 74, 161, y + 120, "plain")
        d.label(172, y + 102, "no", "soft small")
    d.rect(16, 384, 290, 72, "center")
    d.text(161, 414, "service.serve, connect", "mono bold")
    d.text(161, 437, "begin with dynsgd, or easgd", "small")
    d.rect(392, 384, 312, 72, "frame")
    d.text(548, 414, "one worker of it may be a whole mesh,", "small soft")
    d.text(548, 437, "and rounds are a setting of the center", "small soft")
    d.line(308, 420, 390, 420, "dash")
    d.write()


def main() -> None:
    """Write all drawings."""
    chart()
    what_and_why()
    one_round()
    four_ways()
    asynchronous()


if __name__ == "__main__":
    main()
