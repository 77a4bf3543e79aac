"""Colours of the report: one name, one hex for light paper and one for dark.

Charts are drawn once, in the light colours; the page's style sheet recolours them by attribute
selector, so every light hex must be unique. Hues follow Okabe and Ito, which colour-blind readers
can tell apart.
"""

COLOURS: dict[str, tuple[str, str]] = {
    "ink": ("#1b1f24", "#e6e9ed"),
    "muted": ("#586170", "#a3adb9"),
    "grid": ("#e5e8ec", "#2b3138"),
    "axis": ("#8b95a1", "#6b7682"),
    "ttft": ("#0072b2", "#5cb8f0"),
    "e2e": ("#c25400", "#ff9d5c"),
    "itl": ("#7b3fb0", "#c79bf0"),
    "icl": ("#8a3f8f", "#dd9be0"),
    "tpot": ("#6a4a00", "#d8b45c"),
    "good": ("#00795a", "#3fd3a5"),
    "bad": ("#b3123f", "#ff7f9d"),
    "unsure": ("#8a6100", "#e8b949"),
    "knee": ("#a87b00", "#d9a520"),
    "usable": ("#009e73", "#2fc795"),
    "planned": ("#6f7a87", "#97a2af"),
    # stages, from the lowest to the highest load
    "step0": ("#56a8dc", "#39719c"),
    "step1": ("#3f8fd2", "#4b83c4"),
    "step2": ("#4a73c8", "#6f93e0"),
    "step3": ("#6a58bd", "#9a9cf2"),
    "step4": ("#8a3fa6", "#c6a2f5"),
    "step5": ("#9f2b84", "#eda6e4"),
    "step6": ("#9c1b58", "#ffb0c4"),
    "step7": ("#701030", "#ffd2cf"),
    # classes, or length combinations
    "curve0": ("#0a6ab0", "#62b5ef"),
    "curve1": ("#c4500a", "#ff9a55"),
    "curve2": ("#0c7d5e", "#45cfa0"),
    "curve3": ("#8b3fa5", "#cda0f2"),
    "curve4": ("#8a6a02", "#e3bd52"),
    "curve5": ("#b0215a", "#ff86ae"),
    # causes of failure
    "http_error": ("#d55e01", "#ff8a3d"),
    "stream_error": ("#e69f00", "#ffc34d"),
    "truncated": ("#8f7f00", "#e5d84a"),
    "empty": ("#999999", "#b5b5b5"),
    "timeout": ("#0071b3", "#59b5ec"),
    "connect_error": ("#4b2e83", "#a98de6"),
    "reset": ("#009e74", "#3bd0a2"),
    "protocol_error": ("#cc79a7", "#eda3cc"),
    "shed": ("#6b4423", "#c79a72"),
    "unfinished": ("#56b4e9", "#8fd0f7"),
    "cancelled": ("#c9ced4", "#59636e"),
    "too_long": ("#b9a3d0", "#6f5a86"),
    "rate_limited": ("#b3001b", "#ff6b7d"),
    "auth": ("#5d4037", "#bc9a8c"),
    "overloaded": ("#ad4100", "#ff9459"),
    "redirect": ("#607d8b", "#9db4bf"),
    "bad_request": ("#7b6d00", "#d6c634"),
    "upstream": ("#874f9e", "#cf9ae3"),
    "other_error": ("#333a42", "#cfd5db"),
}

CURVES = [name for name in COLOURS if name.startswith("curve")]
STEPS = [name for name in COLOURS if name.startswith("step")]


def light(name: str) -> str:
    """Return the hex in which charts are drawn."""
    return COLOURS[name][0]


def style_sheet() -> str:
    """Return the CSS variables of both themes, and the rules that recolour the charts by them."""
    variables = [
        "".join(f"--{n}:{pair[theme]};" for n, pair in COLOURS.items()) for theme in (0, 1)
    ]
    rules = "".join(
        f'svg [{attribute}="{pair[0]}"]{{{attribute}:var(--{name})}}\n'
        for name, pair in COLOURS.items()
        for attribute in ("fill", "stroke")
    )
    return (
        f":root{{{variables[0]}}}\n"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{variables[1]}}}}}\n{rules}"
    )
