// The charts: what each one shows, and the cards that draw them with uPlot. All share one x axis, the
// optimizer step, one cursor and one zoom.
import { bytes, count, fixed, milliseconds, percent, quantile, seconds, si, trimmed } from "./format.js";

const column = (name) => (model) => model.steps.map((step) => model.rows.get(step)?.[name] ?? null);
const MAX_LINES = 6;

// A chart: title, unit, format, and series(model) -> [{label, color, values, ...}] over model.steps.
export const CHARTS = [
  {
    id: "reward", title: "Reward", format: (v) => fixed(v, 3), axis: trimmed,
    series: (model) => {
      const values = column("reward")(model);
      return [
        { label: "step mean", color: 0, values, faint: true },
        { label: "smoothed", color: 0, values: smooth(values), width: 2.2 },
        { label: "std", color: 4, values: column("reward_std")(model), legendOnly: true },
      ];
    },
  },
  {
    id: "lag", title: "Policy lag", unit: "steps", format: (v) => trimmed(v, 2), zero: true,
    series: (model) => [
      { label: "max", color: 1, values: column("lag_max")(model), step: true },
      { label: "mean", color: 0, values: column("lag_mean")(model), width: 2 },
    ],
  },
  {
    id: "mismatch", title: "Mismatch k3 by lag", unit: "nats, log", format: si, log: true,
    series: (model) => {
      const lags = [...new Set([...model.mismatch.values()].flatMap((by) => [...by.keys()]))].sort((a, b) => a - b);
      const shown = lags.slice(0, MAX_LINES);
      const lines = shown.map((lag, i) => ({
        label: `lag ${lag}`, color: i, width: lag === 0 ? 2.2 : 1.4,
        values: model.steps.map((step) => positive(model.mismatch.get(step)?.get(lag)?.k3)),
      }));
      return lines.length ? lines : [{ label: "lag 0", color: 0, values: column("k3_lag0")(model).map(positive), width: 2.2 }];
    },
  },
  {
    id: "delta", title: "Delta size", format: bytes, axis: (v) => bytes(v).replace(/\.0+ /, " "), zero: true,
    series: (model) => [
      { label: "per version", color: 0, values: column("delta_bytes")(model), width: 1.8, fill: true },
      { label: "full", color: 4, values: column("full_bytes")(model), legendOnly: true },
      { label: "changed", color: 4, values: column("changed")(model), legendOnly: true, format: percent },
    ],
  },
  {
    id: "ratio", title: "Delta ratio", unit: "full ÷ delta", format: (v) => `${count(v)}×`, zero: true,
    series: (model) => [{ label: "times smaller", color: 2, values: column("ratio")(model), width: 1.8 }],
  },
  {
    id: "pause", title: "Swap pause", format: milliseconds, axis: (v) => `${trimmed(v)} ms`, zero: true,
    series: (model) => {
      const names = [...new Set([...model.swaps.values()].flatMap((by) => [...by.keys()]))].sort();
      const pauses = (step) => [...(model.swaps.get(step)?.values() ?? [])].map((s) => s.pause_ms).filter((v) => v !== null);
      if (names.length > MAX_LINES) {
        return [
          { label: "p50 of replicas", color: 0, values: model.steps.map((step) => quantile(pauses(step), 0.5)), points: true },
          { label: "slowest", color: 1, values: model.steps.map((step) => quantile(pauses(step), 1)), points: true },
        ];
      }
      return names.map((name, i) => ({
        label: name, color: i, points: true, values: model.steps.map((step) => model.swaps.get(step)?.get(name)?.pause_ms ?? null),
      }));
    },
  },
  {
    id: "tokens", title: "Tokens per second", format: count, zero: true,
    series: (model) => [
      { label: "generated", color: 0, values: column("generated_per_s")(model), width: 1.8 },
      { label: "trained", color: 1, values: column("trained_per_s")(model), width: 1.8 },
    ],
  },
  {
    id: "idle", title: "Idle share", format: percent, range: [0, 1],
    series: (model) => [
      { label: "trainer waiting", color: 1, values: column("trainer_idle")(model), width: 1.8 },
      { label: "replicas idle", color: 0, values: column("replicas_idle")(model), width: 1.8 },
    ],
  },
  {
    id: "time", title: "Step time", format: seconds, axis: (v) => `${trimmed(v)} s`, zero: true,
    series: (model) => [
      { label: "step", color: 4, values: column("step_s")(model), width: 1.8, fill: true },
      { label: "wait", color: 1, values: column("wait_s")(model) },
      { label: "train", color: 0, values: column("forward_backward_s")(model) },
      { label: "publish", color: 2, values: column("publish_s")(model) },
    ],
  },
];

const positive = (value) => (value > 0 ? value : null);

function smooth(values) {
  let mean = null;
  return values.map((value) => {
    if (value !== null) mean = mean === null ? value : mean + 0.25 * (value - mean);
    return mean;
  });
}

// Draws the charts into `parent`.
export function makeCards(parent, charts) {
  const shared = { zoom: null, last: 0, focus: null, model: null, busy: false };
  const cards = charts.map((chart) => new Card(parent, chart, shared));
  const all = (act) => {
    if (shared.busy) return;
    shared.busy = true;
    for (const card of cards) act(card);
    shared.busy = false;
  };
  shared.focusOn = (step) => {
    shared.focus = step;
    all((card) => card.showFocus());
  };
  shared.zoomTo = (zoom) => {
    shared.zoom = zoom;
    all((card) => card.update());
  };
  return {
    update(model) {
      shared.model = model;
      all((card) => card.update());
    },
    showLast(last) {
      shared.last = last;
      shared.zoomTo(null);
    },
    restyle: () => all((card) => card.rebuild()),
  };
}

function bounds({ model, zoom, last }) {
  if (zoom) return zoom;
  const [first, end] = [model.steps[0], model.steps.at(-1)];
  const start = last ? Math.max(first, end - last + 1) : first;
  return start === end ? [start - 1, end + 1] : [start, end];
}

class Card {
  constructor(parent, chart, shared) {
    this.chart = chart;
    this.shared = shared;
    this.plot = null;
    this.key = "";
    const figure = document.createElement("figure");
    figure.id = `chart-${chart.id}`;
    figure.innerHTML = `<figcaption><h2></h2><ul class="legend"></ul></figcaption><div class="plot" tabindex="0" role="slider"></div>`;
    figure.querySelector("h2").textContent = chart.title;
    if (chart.unit) {
      const unit = document.createElement("span");
      unit.className = "unit";
      unit.textContent = chart.unit;
      figure.querySelector("h2").append(" ", unit);
    }
    this.legend = figure.querySelector(".legend");
    this.box = figure.querySelector(".plot");
    this.box.setAttribute("aria-label", `${chart.title} by step`);
    this.box.onkeydown = (event) => this.walk(event);
    this.box.onblur = () => shared.focusOn(null);
    parent.append(figure);
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  update() {
    const { model } = this.shared;
    if (!model || !model.steps.length) return;
    this.lines = this.chart.series(model);
    const drawn = this.lines.filter((line) => !line.legendOnly);
    const dense = model.steps.length > 500;
    const key = JSON.stringify([dense, ...this.lines.map((line) => [line.label, line.color])]);
    if (key !== this.key) {
      this.key = key;
      this.plot?.destroy();
      this.plot = null;
      this.buildLegend();
    }
    const empty = !drawn.some((line) => line.values.some((value) => value !== null));
    this.note(empty ? "no values yet" : "");
    const data = [model.steps, ...drawn.map((line) => line.values)];
    if (!this.plot) {
      if (!this.box.clientWidth) return;
      this.plot = new uPlot(this.options(drawn), data, this.box);
    } else {
      this.plot.setData(data, false);
    }
    const [min, max] = bounds(this.shared);
    this.plot.setScale("x", { min, max });
    this.showValues();
  }

  rebuild() {
    this.key = "";
    this.update();
  }

  resize() {
    if (this.plot) this.plot.setSize({ width: this.box.clientWidth, height: this.box.clientHeight });
    else this.update();
  }

  options(lines) {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const { chart, shared } = this;
    const axis = { stroke: color("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false } };
    const whole = (_, ticks) => ticks.map((v) => (Number.isInteger(v) ? count(v) : ""));
    const label = chart.axis ?? chart.format;
    return {
      width: this.box.clientWidth, height: this.box.clientHeight, legend: { show: false }, padding: [10, 8, 0, 0],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      scales: { x: { time: false }, y: chart.log ? { distr: 3, range: decades } : { range: chart.range ?? room(chart.zero) } },
      axes: [
        { ...axis, values: whole, size: 26, space: 60 },
        { ...axis, values: (_, ticks) => ticks.map((v) => (v === null ? "" : label(v))), size: 54, space: 32 },
      ],
      series: [{}, ...lines.map((line) => this.style(line, color(`--c${line.color}`)))],
      hooks: {
        setCursor: [(plot) => !shared.busy && shared.focusOn(plot.cursor.idx == null ? null : plot.data[0][plot.cursor.idx])],
        setSelect: [(plot) => this.zoom(plot)],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => shared.zoomTo(null))],
      },
    };
  }

  style(line, stroke) {
    return {
      label: line.label, stroke: line.faint ? `${stroke}66` : stroke, width: (line.width ?? 1.4) * (this.shared.model.steps.length > 500 ? 0.6 : 1), spanGaps: true,
      fill: line.fill ? `${stroke}1f` : undefined,
      paths: line.points ? () => null : line.step ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: line.points ? { show: true, size: 5, fill: stroke, width: 0 } : { show: this.shared.model.steps.length < 3, size: 5, fill: stroke },
    };
  }

  zoom(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.shared.zoomTo(range);
  }

  walk(event) {
    const { steps } = this.shared.model ?? { steps: [] };
    const [min, max] = bounds(this.shared);
    const seen = steps.filter((step) => step >= min && step <= max);
    if (!seen.length) return;
    const at = this.shared.focus === null ? seen.length - 1 : Math.max(0, seen.indexOf(this.shared.focus));
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 10, PageDown: at + 10, Home: 0, End: seen.length - 1 };
    if (event.key === "Escape") this.shared.zoomTo(null);
    else if (!(event.key in moves)) return;
    else this.shared.focusOn(seen[Math.min(seen.length - 1, Math.max(0, moves[event.key]))]);
    event.preventDefault();
  }

  showFocus() {
    const { focus } = this.shared;
    if (this.plot) {
      const left = focus === null ? -10 : this.plot.valToPos(focus, "x");
      this.plot.setCursor({ left, top: focus === null ? -10 : 1 }, false);
    }
    this.showValues();
  }

  showValues() {
    const { model, focus } = this.shared;
    if (!this.lines || !model) return;
    const at = focus === null ? null : model.steps.indexOf(focus);
    const texts = this.lines.map((line) => (line.format ?? this.chart.format)(at === null ? latest(line.values) : line.values[at]));
    this.legend.querySelectorAll("b").forEach((node, i) => {
      if (node.textContent !== texts[i]) node.textContent = texts[i];
    });
    const step = focus ?? model.steps.at(-1);
    this.box.setAttribute("aria-valuemin", model.steps[0]);
    this.box.setAttribute("aria-valuemax", model.steps.at(-1));
    this.box.setAttribute("aria-valuenow", step);
    this.box.setAttribute("aria-valuetext", `step ${step}: ${this.lines.map((line, i) => `${line.label} ${texts[i]}`).join(", ")}`);
  }

  buildLegend() {
    this.legend.replaceChildren(
      ...this.lines.map((line) => {
        const item = document.createElement("li");
        if (!line.legendOnly) {
          const swatch = document.createElement("i");
          swatch.style.setProperty("--swatch", `var(--c${line.color})`);
          if (line.faint) swatch.style.opacity = 0.45;
          item.append(swatch);
        }
        item.append(line.label, document.createElement("b"));
        return item;
      }),
    );
  }

  note(text) {
    let node = this.box.querySelector(".none");
    if (!text) return node?.remove();
    if (!node) {
      node = document.createElement("div");
      node.className = "none";
      this.box.append(node);
    }
    node.textContent = text;
  }
}

const latest = (values) => values.findLast((value) => value !== null) ?? null;

function room(zero) {
  return (_, min, max) => {
    if (min === null || max === null) return [0, 1];
    const low = zero ? Math.min(0, min) : min;
    if (zero && max <= 0 && low === 0) return [0, 1];
    const space = (max - low || Math.abs(max) || 1) * 0.08;
    return [zero && low === 0 ? 0 : low - space, max + space];
  };
}

function decades(_, min, max) {
  if (!(min > 0)) return [1e-4, 1e-1];
  return [10 ** Math.floor(Math.log10(min)), 10 ** Math.ceil(Math.log10(max * 1.0001))];
}
