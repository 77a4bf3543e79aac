"use strict";
// The page's own script: live charts, the timeline's span, copy buttons, the table of contents.
(() => {
  const CANVAS_ROWS = 2000; // above it a chart is drawn on a canvas: an element a point is slow
  const live = JSON.parse(document.getElementById("live").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views = new Map(); // by the chart's name: { width, view }
  window.reportViews = views;

  const rowsOf = spec => Math.max(0, ...Object.values(spec.datasets).map(rows => rows.length));

  // The style sheet recolours SVG; a canvas is drawn in the colours of the theme.
  function themed(spec) {
    const text = JSON.stringify(spec);
    return JSON.parse(dark.matches ? text.replace(/#[0-9a-f]{6}/g, c => live.dark[c] || c) : text);
  }

  async function draw(figure) {
    const name = figure.id.slice("chart-".length), spec = live.specs[name];
    const target = figure.querySelector(".live");
    const width = figure.clientWidth;
    if (!spec || !width || views.get(name)?.width === width) return;
    views.set(name, { width });
    const canvas = rowsOf(spec) > CANVAS_ROWS, sized = canvas ? themed(spec) : structuredClone(spec);
    if (sized.vconcat) {
      for (const panel of sized.vconcat) panel.width = width - sized.usermeta.beside;
    } else {
      sized.width = width;
      sized.autosize = { type: "fit-x", contains: "padding" };
    }
    const options = { actions: false, ast: true, renderer: canvas ? "canvas" : "svg" };
    const { view } = await vegaEmbed(target, sized, options);
    figure.classList.add("drawn");
    views.set(name, { width, view });
    for (const { name: param, bind } of spec.params || []) {
      if (param === "from_s") brush(view, spec);
      if (bind.input === "checkbox") view.addSignalListener(param, (_, on) => {
        figure.querySelectorAll(`[data-switch=${param}]`).forEach(key => { key.hidden = !on; });
      });
    }
  }

  // Let dragging over the first panel set the span of the others.
  function brush(view, spec) {
    const end = spec.params.find(param => param.name === "to_s").value;
    view.addSignalListener("brush", (_, { x }) => {
      const [from, to] = x && x[1] > x[0] ? x : [0, end];
      view.signal("from_s", from).signal("to_s", to).runAsync();
    });
  }

  if (window.vegaEmbed) {
    const near = new IntersectionObserver(entries => {
      for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
    }, { rootMargin: "400px" });
    let waiting = 0;
    const resized = new ResizeObserver(entries => {
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        for (const { target } of entries) if (target.classList.contains("drawn")) draw(target);
      }, 150);
    });
    for (const figure of document.querySelectorAll("figure")) {
      near.observe(figure);
      resized.observe(figure);
    }
    dark.addEventListener("change", () => {
      views.clear();
      document.querySelectorAll("figure.drawn").forEach(draw);
    });
  }

  for (const button of document.querySelectorAll("button[data-copies]")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const range = document.createRange();
      range.selectNodeContents(document.getElementById(button.dataset.copies));
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
      button.textContent = "Copied";
    });
  }

  const links = [...document.querySelectorAll(".toc a")];
  const passing = new IntersectionObserver(entries => {
    for (const { isIntersecting, target } of entries) {
      const link = links.find(a => a.hash === `#${target.id}`);
      if (link && isIntersecting) {
        links.forEach(a => a.removeAttribute("aria-current"));
        link.setAttribute("aria-current", "true");
      }
    }
  }, { rootMargin: "-10% 0px -80% 0px" });
  document.querySelectorAll("section[id]").forEach(section => passing.observe(section));
})();
