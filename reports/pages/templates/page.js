"use strict";
// The page's own script: live charts, the timeline's span, copy buttons, the table of contents.
(() => {
  const CANVAS_ROWS = 2000; // above it a chart is drawn on a canvas: an element a point is slow
  const live = JSON.parse(document.getElementById("live").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const views = new Map(); // by the chart's name: { width, view }
  const figures = document.querySelectorAll("figure");
  window.report = { views, drawAll: () => Promise.all([...figures].map(draw)) };

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
    // A screen reader gets the chart's text, and the figures from the tables.
    target.querySelector("svg, canvas").setAttribute("aria-hidden", "true");
    figure.setAttribute("aria-label", spec.description);
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
      const chosen = (x || []).map(at => Math.round(10 * at) / 10);
      const [from, to] = chosen[1] > chosen[0] ? chosen : [0, end];
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
    for (const figure of figures) {
      near.observe(figure);
      resized.observe(figure);
    }
    dark.addEventListener("change", () => {
      views.clear();
      document.querySelectorAll("figure.drawn").forEach(draw);
    });
  }

  // A number as the fraction that its shortest text shows: 1.1 is 11/10.
  function exact(number) {
    const [text, power] = String(number).split("e"), [whole, part = ""] = text.split(".");
    const shift = Number(power || 0) - part.length, scale = 10n ** BigInt(Math.abs(shift));
    const digits = BigInt(whole + part);
    return shift < 0 ? [digits, scale] : [digits * scale, 1n];
  }

  const roundedUp = (top, bottom) => Number((top + bottom - 1n) / bottom);

  // The same as fleet_figures (analysis/capacity/fleet_figures.py), operation by operation.
  function fleet(given) {
    const [peak, peakOf] = exact(given.peak_rps), [rate, rateOf] = exact(given.capacity_rps);
    const before = roundedUp(peak * rateOf, peakOf * rate);
    const [safety, safetyOf] = exact(given.safety_factor);
    const instances = roundedUp(BigInt(before) * safety, safetyOf);
    const gpus = instances * given.tensor_parallel, carried = instances * given.capacity_rps;
    const load = given.utilisation === null ? given.peak_rps : given.utilisation * carried;
    const hourly = given.gpu_hour_usd === null ? null : gpus * given.gpu_hour_usd;
    const cost = (of, number) => hourly === null || !of ? null : hourly / (3600 * load * of) * number;
    return {
      instances_before_safety: before,
      instances,
      gpus,
      one_replica_down: Math.max(instances, before + 1),
      utilisation: load / carried,
      cost_per_hour: hourly,
      cost_per_year: hourly === null ? null : 8760 * hourly,
      fleet_cost_per_million_output_tokens: cost(given.output_tokens, 1e6),
      fleet_cost_per_thousand_requests: cost(1, 1e3),
    };
  }

  function whatIf(form) {
    const data = JSON.parse(document.getElementById("fleet").textContent);
    const outcome = form.querySelector(".outcome"), limit = form.querySelector("#limit");
    const figure = value => value.toLocaleString("en-US", { maximumSignificantDigits: 3 });
    const count = value => value.toLocaleString("en-US");
    const counted = value => `${count(value)} ${value === 1 ? "instance" : "instances"}`;
    const command = form.querySelector("#plan-command"), plan = command.textContent;
    const quoted = value => /^[\w=.:%+-]+$/.test(value) ? value : `'${String(value).replaceAll("'", "'\\''")}'`;
    const decimals = n => ({ minimumFractionDigits: n, maximumFractionDigits: n });
    const usd = value => value === null ? "–"
      : value < 1 ? `$${figure(value)}`  // as usd in analysis/capacity/levels.py
      : `$${value.toLocaleString("en-US", decimals(value < 99.995 ? 2 : 0))}`;

    function read() {
      const of = name => form.querySelector(`#${name}`).value;
      const at = data.limits[limit ? limit.value : 0];
      return {
        ...data,
        at,
        capacity_rps: at.capacity_rps,
        peak_rps: Number(of("peak_rps")),
        safety_factor: Number(of("safety_factor")),
        gpu_hour_usd: Number(of("gpu_hour_usd")) || null,
        utilisation: of("utilisation") === "" ? null : Number(of("utilisation")) / 100,
      };
    }

    function size() {
      const given = read();
      if (!given.capacity_rps) return { why: given.at.reason || "no capacity was found" };
      if (!(given.peak_rps > 0)) return { why: "the peak must be above 0" };
      if (!(given.safety_factor >= 1)) return { why: "the safety factor must be 1 or more" };
      if (given.gpu_hour_usd < 0) return { why: "the price must be 0 or more" };
      if (given.utilisation !== null && !(given.utilisation > 0 && given.utilisation <= 1)) {
        return { why: "the mean load must be above 0 and at most 100 %" };
      }
      const { crossing, capacity_rps_ci: ci } = given.at;
      const [low, high] = crossing === "saturated" ? [null, given.capacity_rps] : ci || [null, null];
      const ends = [high, low].map(rate => rate && fleet({ ...given, capacity_rps: rate }).instances);
      return { ...fleet(given), capacity_rps: given.capacity_rps, instances_ci: ends };
    }

    function show() {
      const given = read(), found = size();
      if (limit) {
        form.querySelector("#limit-text").textContent = given.at.slo.replace("=", " ≤ ");
        limit.setAttribute("aria-valuetext", given.at.slo);
      }
      const options = [["peak-rps", given.peak_rps], ["safety", given.safety_factor],
        ["gpu-hour", given.gpu_hour_usd], ["utilisation", given.utilisation],
        ...(limit && !given.at.given ? [given.at.slo, ...data.slos].map(text => ["slo", text]) : [])];
      command.closest(".command").hidden = Boolean(found.why);
      command.textContent = plan + options
        .map(([name, value]) => value === null ? "" : ` --${name} ${quoted(value)}`).join("");
      const cost = value => given.gpu_hour_usd === null ? "set a price" : usd(value);
      const load = given.utilisation === null ? "if the peak lasts all day"
        : `at ${Math.round(100 * found.utilisation)} % mean load`;
      const rows = found.why ? [["No fleet", found.why]] : [
        ["One instance carries", `${figure(found.capacity_rps)} req/s`],
        ["Instances", count(found.instances) + range(found.instances_ci)],
        ["GPUs", count(found.gpus) + range(times(found.instances_ci, given.tensor_parallel))],
        ["To carry the peak with one down", spare(found)],
        [given.utilisation === null ? "Load at the peak" : "Mean load", `${figure(100 * found.utilisation)} %, ${figure(found.utilisation * found.capacity_rps)} req/s each`],
        ["Headroom at the peak", left(found, given)],
        ["An hour", cost(found.cost_per_hour)],
        ["A year", cost(found.cost_per_year) + yearly(found, given)],
        [`1,000 requests ${load}`, cost(found.fleet_cost_per_thousand_requests)],
        [`1 M output tokens ${load}`, cost(found.fleet_cost_per_million_output_tokens)],
      ];
      const slider = form.querySelector("[data-of=utilisation]");
      if (given.utilisation === null && !found.why) slider.value = Math.round(100 * found.utilisation);
      form.querySelector("#as-sized").hidden = asSized();
      outcome.replaceChildren(...rows.map(([name, text]) => {
        const row = document.createElement("div");
        row.append(document.createElement("dt"), document.createElement("dd"));
        [row.firstChild.textContent, row.lastChild.textContent] = [name, text];
        return row;
      }));
    }

    const times = (ends, factor) => ends.map(end => end && end * factor);
    const spare = ({ one_replica_down: needed, instances }) => needed > instances
      ? `${counted(needed)}: ${count(needed - instances)} more` : `${counted(needed)}: enough`;
    const left = ({ instances, instances_before_safety: needed, capacity_rps: rate }, { peak_rps: peak }) =>
      `${figure(Math.max(0, instances * rate - peak))} req/s`
      + (instances > needed ? `, or ${counted(instances - needed)}` : "");
    const yearly = (found, given) => {
      const [low, high] = times(found.instances_ci, 8760 * given.tensor_parallel * given.gpu_hour_usd);
      return low && high && low !== high ? ` (${usd(low)} to ${usd(high)})` : "";
    };
    const range = ([low, high]) => low && low === high ? ""
      : low && high ? ` (${count(low)} to ${count(high)})`
      : high ? ` (at most ${count(high)})` : low ? ` (at least ${count(low)})` : "";
    const inputs = [...form.querySelectorAll("input[type=number]")];
    const asSized = () => inputs.every(input => input.value === input.defaultValue)
      && !(limit && Number(limit.value) !== sizedAt);
    form.addEventListener("submit", event => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => {
      if (limit) limit.value = sizedAt;
      show();
    }));
    form.addEventListener("input", ({ target }) => {
      const slider = form.querySelector(`[data-of="${target.id}"]`);
      if (target.dataset.of) form.querySelector(`#${target.dataset.of}`).value = target.value;
      if (slider && target.value !== "") slider.value = target.value;
      show();
    });
    const sizedAt = data.limits.findIndex(at => at.given);
    if (limit) limit.value = sizedAt;
    form.hidden = false;
    show();
    window.report.fleet = size;
  }

  const form = document.getElementById("what-if");
  if (form) whatIf(form);

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
