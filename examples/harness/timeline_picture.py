"""Draw a timeline file as a picture: the lanes of sessions, and the KV use of workers above them.

    tidegate trace export .tidegate/traces --as perfetto -o run.json.gz
    python examples/harness/timeline_picture.py run.json.gz run.png

Needs matplotlib. The file is plain JSON in the Chrome trace format: whatever ui.perfetto.dev shows can be had from it.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

STAGES = {"held": "#e4572e", "queued": "#c9c9c9", "prefill": "#4c78a8", "decode": "#9ecae9"}
TOOL, TOOL_EDGE = "#f2cf5b", "#b8901f"
NAMED_S = 0.06
"""Tools are named where a letter has so many seconds."""


def main(source: Path, picture: Path) -> None:
    data = source.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(data) if source.suffix == ".gz" else data)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    zero = min(event["ts"] for event in slices)
    ends = max(event["ts"] + event["dur"] for event in slices)
    metadata = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    names = {tid: args["name"] for (kind, _, tid), args in metadata.items() if kind == "thread_name"}
    places = {tid: args["sort_index"] for (kind, _, tid), args in metadata.items() if kind == "thread_sort_index"}
    rows = {tid: row for row, tid in enumerate(sorted(names, key=lambda tid: places[tid]))}

    height = 1.8 + 0.19 * len(rows)
    figure, (above, lanes) = plt.subplots(
        2, 1, figsize=(13, height), sharex=True, gridspec_kw={"height_ratios": [1.3, height]}, layout="constrained"
    )
    for (kind, pid, _), args in metadata.items():
        use = [event for event in events if (event["ph"], event["pid"], event["name"]) == ("C", pid, "KV use (%)")]
        if kind == "process_name" and use:
            times = [(event["ts"] - zero) / 1e6 for event in use]
            values = [max(event["args"].values()) for event in use]
            above.step(times, values, where="post", label=args["name"].removeprefix("Worker "), lw=1.3)
    for event in slices:
        span, row = [((event["ts"] - zero) / 1e6, event["dur"] / 1e6)], rows[event["tid"]]
        if event["cat"] == "tidegate.stage":
            lanes.broken_barh(span, (row - 0.4, 0.8), color=STAGES[event["name"]], lw=0)
        elif event["cat"] == "tidegate.tool":
            inferred = event["args"]["inferred"]
            face, hatch = ("white", "////") if inferred else (TOOL, None)
            lanes.broken_barh(span, (row - 0.3, 0.6), facecolor=face, edgecolor=TOOL_EDGE, lw=0.6, hatch=hatch)
            name = event["name"].removeprefix("tool ")
            if span[0][1] > NAMED_S * len(name):
                box = {"facecolor": face, "edgecolor": "none", "pad": 0.6}
                lanes.text(span[0][0] + 0.03, row, name, va="center", fontsize=5.5, color="#5b4606", bbox=box)
    draw_arrows(lanes, events, rows, zero)

    lanes.set_yticks(list(rows.values()), [names[tid] for tid in rows], fontsize=6)
    lanes.set_ylim(len(rows) - 0.4, -0.6)
    lanes.set_xlim(-0.2, (ends - zero) / 1e6 + 0.2)
    lanes.set_xlabel("seconds")
    above.set_ylim(0, 105)
    above.set_ylabel("KV use (%)")
    above.legend(loc="upper right", fontsize=8, frameon=False, ncols=4)
    legend = [Patch(color=color, label=name) for name, color in STAGES.items()]
    legend += [Patch(facecolor=TOOL, edgecolor=TOOL_EDGE, label="tool, told by its harness")]
    legend += [Patch(facecolor="white", edgecolor=TOOL_EDGE, hatch="////", label="tool, inferred")]
    figure.legend(handles=legend, loc="outside lower center", fontsize=8, frameon=False, ncols=6)
    for axes in (above, lanes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)


def draw_arrows(lanes: Any, events: list[dict[str, Any]], rows: dict[int, int], zero: int) -> None:
    """From parent to sub-agent and back."""
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    for start in events:
        if start["ph"] != "s":
            continue
        points = [((end["ts"] - zero) / 1e6, rows[end["tid"]]) for end in (start, ends[start["id"]])]
        style = {"arrowstyle": "->", "lw": 0.6, "color": "#555", "connectionstyle": "arc3,rad=.15"}
        lanes.annotate("", xytext=points[0], xy=points[1], arrowprops=style)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
