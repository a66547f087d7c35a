#!/usr/bin/env python3
"""Draw the table "restore beside prefill" of bench_snapshot as an SVG.

    bench/plot_snapshots.py RESULT.md PLOT.svg

RESULT.md is what bench_snapshot printed, or a page that has it.  Points are what was measured, lines
are the fitted costs t = a + n b + n^2 c; both axes are logarithmic.  Standard library only."""
import math
import sys

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 30, 50
SERIES = (  # name, column of the measured table, colour
    ("prefill", 2, "#c2410c"),
    ("cold restore", 4, "#1d4ed8"),
    ("hot restore", 6, "#15803d"),
)


def tables(lines):
    """Each Markdown table as its rows of cells, the first being the heading."""
    table = []
    for line in lines + [""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not set("".join(cells)) <= set("-:"):
                table.append(cells)
        elif table:
            yield table
            table = []


def read(path):
    """Measured [(n, [ms of each series])] and the costs {name: (a, b, c)} in milliseconds."""
    measured, costs = [], {}
    with open(path, encoding="utf-8") as file:
        for table in tables(file.read().splitlines()):
            if table[0][0] == "positions":
                measured = [(int(row[0]), [float(row[column]) for _, column, _ in SERIES]) for row in table[1:]]
            elif table[0][1:4] == ["a ms", "b us", "c ns"]:
                costs = {row[0]: (float(row[1]), float(row[2]) / 1e3, float(row[3]) / 1e6) for row in table[1:]}
    if not measured or set(costs) != {name for name, _, _ in SERIES}:
        sys.exit(f"{path}: has not both tables of bench_snapshot prefill")
    return measured, costs


def draw(measured, costs):
    lengths = [n for n, _ in measured]
    times = [t for _, row in measured for t in row]
    x_low, x_high = math.log2(min(lengths)), math.log2(max(lengths))
    y_low, y_high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def x_of(n):
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(n) - x_low) / (x_high - x_low)

    def y_of(t):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(t) - y_low) / (y_high - y_low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for power in range(y_low, y_high + 1):
        y = y_of(10**power)
        label = f"{10**power:g} ms" if power < 3 else f"{10**(power - 3):g} s"
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d4d4d4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for n in lengths:
        x = x_of(n)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#ececec"/>')
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{n}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">positions of the context</text>')
    for i, (name, _, colour) in enumerate(SERIES):
        a, b, c = costs[name]
        fitted = []
        for step in range(101):
            n = 2 ** (x_low + (x_high - x_low) * step / 100)
            t = a + n * (b + n * c)
            if t >= 10**y_low:
                fitted.append(f"{x_of(n):.1f},{y_of(t):.1f}")
        out.append(f'<polyline points="{" ".join(fitted)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for n, row in measured:
            out.append(f'<circle cx="{x_of(n):.1f}" cy="{y_of(row[i]):.1f}" r="3.5" fill="{colour}"/>')
        y = y_of(measured[-1][1][i]) + 4
        out.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y:.1f}" fill="{colour}">{name}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    if len(sys.argv) != 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(draw(*read(sys.argv[1])))


if __name__ == "__main__":
    main()
