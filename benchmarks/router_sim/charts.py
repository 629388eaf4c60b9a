"""One chart per workload and number of replicas: goodput, mean time to first token, hits and skew over load.

The thick line is Octavo. The colours are Okabe and Ito's, which colour-blind readers can distinguish; each policy also
has a marker.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from router_sim.figures import Figures
from router_sim.study import Case, Setting

Results = dict[Case, Figures]
Panel = tuple[str, Callable[[Figures], float], str]

_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osv^Dx+*<>P"
_PANELS: tuple[Panel, ...] = (
    ("Goodput, share of what was offered", lambda f: f.goodput / f.offered_rate, "linear"),
    ("Mean time to first token, s", lambda f: f.ttft_mean_s, "log"),
    ("Prefix hits, share of the oracle's", lambda f: f.hits_of_oracle, "linear"),
    ("Skew: most loaded replica over mean", lambda f: f.skew, "log"),
)
_STYLE: Any = {  # matplotlib lists every key in its type
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "octavo",
    "font.size": 9,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
}


def save_charts(folder: Path, results: Results) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    with matplotlib.rc_context(_STYLE):
        for setting in dict.fromkeys(case.setting for case in results):
            figure = draw(setting, {case: found for case, found in results.items() if case.setting == setting})
            for suffix, metadata in ((".png", None), (".svg", {"Date": None})):
                path = folder / f"{setting.workload}-{setting.replicas}{suffix}"
                figure.savefig(path, dpi=110, metadata=metadata)
                saved.append(path)
    return saved


def draw(setting: Setting, results: Results) -> Figure:
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    figure.suptitle(f"{setting.workload}, {setting.replicas} replicas ({setting.hardware})", fontweight="bold")
    panels = figure.subplots(2, 2)
    for panel, (title, value_of, scale) in zip(panels.flat, _PANELS, strict=True):
        panel.set_title(title, loc="left")
        panel.set_yscale(scale)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}" if scale == "log" else "")
        panel.set_xlabel("offered load, % of capacity")
        for i, policy in enumerate(dict.fromkeys(case.policy for case in results)):
            points = [(100 * c.load, value_of(found)) for c, found in results.items() if c.policy == policy]
            _draw_line(panel, i, policy, points)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    return figure


def _draw_line(panel: Axes, number: int, policy: str, points: list[tuple[float, float]]) -> None:
    """Draw one policy. The first line is thick; lines that reuse a colour are dashed."""
    panel.plot(
        *zip(*points, strict=True),
        color=_COLOURS[number % len(_COLOURS)],
        marker=_MARKERS[number % len(_MARKERS)],
        linestyle="--" if number >= len(_COLOURS) else "-",
        linewidth=2.4 if number == 0 else 1.1,
        markersize=4,
        label=policy,
        zorder=3 if number == 0 else 2,
    )
