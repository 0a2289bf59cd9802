"""A soak's figure: one small chart a column of its CSV, as SVG, by hand: nothing needs to be installed for it."""
import csv
import html

WIDTH, HEIGHT, LEFT, GAP = 860, 92, 70, 34
CHARTS = [("router_rss_mib", "router, resident MiB"), ("nodes_rss_mib", "all nodes, resident MiB"),
          ("descriptors", "descriptors, all processes"), ("threads", "threads, all processes"),
          ("shm_mappings", "shared memory mappings, all processes"), ("not_free", "ledger items not free"),
          ("requests", "requests ended")]


def nice(value):
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def chart(rows, column, title, top, last_s):
    values = [float(row[column]) for row in rows]
    high = max(max(values) * 1.1, 1.0)

    def at(row, value):
        return (f"{LEFT + float(row['seconds']) / last_s * (WIDTH - LEFT - 12):.1f},"
                f"{top + HEIGHT - value / high * HEIGHT:.1f}")

    line = " ".join(at(row, value) for row, value in zip(rows, values))
    yield f'<text x="{LEFT}" y="{top - 7}" class="title">{html.escape(title)}</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - 12}" height="{HEIGHT}" class="frame"/>'
    yield f'<text x="{LEFT - 6}" y="{top + 9}" class="axis">{nice(high)}</text>'
    yield f'<text x="{LEFT - 6}" y="{top + HEIGHT}" class="axis">0</text>'
    yield f'<polyline points="{line}" class="line"/>'
    for row, value in zip(rows, values):
        if row["idle"] == "1":
            x, y = at(row, value).split(",")
            yield f'<circle cx="{x}" cy="{y}" r="2.2" class="idle"/>'


def draw(source, target, title):
    """Reads the CSV and writes the SVG. Dots are moments at which nothing ran."""
    with open(source, newline="", encoding="ascii") as file:
        rows = list(csv.DictReader(file))
    if len(rows) < 2:
        raise ValueError(f"{source} has {len(rows)} rows: too few to draw")
    last_s = max(float(rows[-1]["seconds"]), 1.0)
    bottom = 40 + len(CHARTS) * (HEIGHT + GAP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 24}" font-family="sans-serif">',
             "<style>.title{font-size:13px;fill:#222}.axis{font-size:11px;fill:#555;text-anchor:end}"
             ".frame{fill:#fafafa;stroke:#bbb}.line{fill:none;stroke:#1f6fb2;stroke-width:1.4}",
             ".idle{fill:#c0392b}</style>",
             f'<rect width="{WIDTH}" height="{bottom + 24}" fill="white"/>',
             f'<text x="{LEFT}" y="20" font-size="15">{html.escape(title)}</text>']
    for i, (column, name) in enumerate(CHARTS):
        parts += chart(rows, column, name, 48 + i * (HEIGHT + GAP), last_s)
    parts.append(f'<text x="{LEFT}" y="{bottom + 14}" class="title">0 to {last_s / 60:.0f} minutes; '
                 "red dots: nothing runs</text></svg>")
    with open(target, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")
