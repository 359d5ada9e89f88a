// The page: keeps a model of one run from server-sent events and draws it. No framework, no build step.
import { CHARTS, makeCards } from "./charts.js";
import { bytes, count, fixed, milliseconds, percent, quantile, si } from "./format.js";

const $ = (id) => document.getElementById(id);
const model = { rows: new Map(), mismatch: new Map(), swaps: new Map(), steps: [] };
let overview = null;
let source = null;
let silence = 0;
let attempts = 0;
let cards = null;

// ---- connection ----------------------------------------------------------------------------------------

function connect() {
  source?.close();
  clearTimeout(silence);
  const run = $("run").value || new URLSearchParams(location.search).get("run") || "";
  source = new EventSource(`api/events?run=${encodeURIComponent(run)}`);
  source.onmessage = (message) => {
    attempts = 0;
    link(true);
    watch();
    take(JSON.parse(message.data));
  };
  source.onerror = retry;
  watch();
}

// The server sends something every few seconds. Silence means a dead connection that nobody told us about.
function watch() {
  clearTimeout(silence);
  silence = setTimeout(retry, 20_000);
}

function retry() {
  source?.close();
  clearTimeout(silence);
  link(false);
  silence = setTimeout(connect, Math.min(10_000, 500 * 2 ** attempts++));
}

function link(live) {
  $("link").className = live ? "link live" : "link";
  const text = live ? "live" : "reconnecting";
  if ($("link").textContent !== text) $("link").textContent = text;
  document.body.classList.toggle("stale", !live && overview !== null);
}

// ---- model ---------------------------------------------------------------------------------------------

function take(event) {
  overview = event.overview;
  if (event.full) for (const table of [model.rows, model.mismatch, model.swaps]) table.clear();
  if (event.series) merge(event.series);
  draw(event);
}

function merge({ steps, mismatch, swaps }) {
  const names = Object.keys(steps);
  steps.step.forEach((step, i) => {
    model.rows.set(step, Object.fromEntries(names.map((name) => [name, steps[name][i]])));
  });
  for (const [step, lag, tokens, k1, k3, dp, ess, clipped] of mismatch) {
    entry(model.mismatch, step).set(lag, { tokens, k1, k3, dp, ess, clipped });
  }
  for (const [version, replica, pause_ms] of swaps) entry(model.swaps, version).set(replica, { pause_ms });
  model.steps = [...new Set([...model.rows.keys(), ...model.mismatch.keys()])].sort((a, b) => a - b);
}

function entry(table, key) {
  if (!table.has(key)) table.set(key, new Map());
  return table.get(key);
}

// ---- drawing -------------------------------------------------------------------------------------------

function draw(event) {
  const run = overview.run;
  const view = !run ? "no-run" : model.steps.length === 0 ? "no-step" : "run";
  document.body.dataset.view = view;
  document.body.dataset.step = run?.step ?? "";
  document.title = run ? `${run.step ?? "–"} · ${run.id} · Slipstream` : "Slipstream";
  pickRun(overview.runs, run);
  waiting(view, run);
  notice(run);
  tiles(view, run);
  $("charts").hidden = view !== "run";
  if (view === "run") cards.update(model);
  replicas(overview.replicas, run);
  topics(overview.topics);
  groups(run);
  $("skipped").textContent = event.skipped ? `${event.skipped} messages were not understood (see the monitor's log)` : "";
}

function pickRun(runs, run) {
  const select = $("run");
  const wanted = select.value || new URLSearchParams(location.search).get("run") || "";
  const names = [...runs].reverse();
  if (wanted && !names.includes(wanted)) names.unshift(wanted);
  const key = JSON.stringify([names, run?.id]);
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  const newest = run && !wanted ? `newest (${run.id})` : "newest";
  select.replaceChildren(new Option(newest, ""), ...names.map((name) => new Option(name, name)));
  select.value = wanted;
}

function waiting(view, run) {
  $("waiting").hidden = view === "run";
  if (view === "run") return;
  const named = $("run").value;
  const serving = overview.replicas.filter((r) => r.state === "serving").length;
  const waitingOn = (name) => overview.topics.find((t) => t.topic.endsWith(`.${name}.v1`))?.messages ?? 0;
  set("waiting-title", run ? `Waiting for the first step of ${run.id}` : named ? `Nothing seen of run ${named}` : "Waiting for a run");
  set("waiting-text", "The charts begin with the first optimizer step. Nothing needs to be reloaded.");
  const items = [
    [overview.topics.length > 0, "Kafka answers and the topics are there"],
    [serving > 0, serving ? `${serving} rollout ${serving === 1 ? "replica serves" : "replicas serve"}` : "A rollout replica reports that it serves (topic replicas)"],
    [run !== null, run ? "A recipe runs" : "A recipe runs:", run ? "" : "slipstream run examples/arithmetic/recipe.py"],
    [run?.head, run?.head ? `The trainer published version ${run.head}` : "The trainer publishes its first version (topic versions)"],
  ];
  for (const [name, text] of [["prompts", "prompts published"], ["rollouts", "groups sampled"], ["samples", "groups scored"]]) {
    const n = waitingOn(name);
    items.push([run && n > 0, n ? `${count(n)} ${text}` : `${text[0].toUpperCase()}${text.slice(1)} (topic ${name})`]);
  }
  items.push([false, "The trainer takes its first step (topic steps)"]);
  const next = items.findIndex(([done]) => !done);
  $("waiting-steps").replaceChildren(
    ...items.map(([done, text, command], i) => {
      const line = element("li", text);
      line.className = done ? "done" : i === next ? "next" : "";
      if (command) line.append(element("code", command));
      return line;
    }),
  );
}

function notice(run) {
  const box = $("alert");
  const shown = run && run.gate !== "ok";
  box.hidden = !shown;
  if (!shown) return;
  box.className = run.gate === "hold" ? "notice hold" : "notice";
  const at = run.alert ? ` at step ${run.alert.step}: ${run.alert.reason}` : "";
  set("alert", `Alignment gate: ${run.gate.toUpperCase()}${at}`);
}

function tiles(view, run) {
  if (view !== "run") return $("tiles").replaceChildren();
  const rows = model.steps.map((step) => model.rows.get(step)).filter(Boolean);
  const last = rows.at(-1) ?? {};
  const lag0 = model.mismatch.get(model.steps.at(-1))?.get(0);
  const pauses = [...model.swaps.values()].flatMap((by) => [...by.values()].map((s) => s.pause_ms)).filter((v) => v !== null);
  const mean = (list) => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : null);
  const rewards = rows.map((row) => row.reward).filter((v) => v !== null);
  const gate = { ok: "good", warn: "warn", tighten: "warn", hold: "bad" }[run.gate];
  const n = Math.min(5, Math.floor(rewards.length / 2));
  const trend = n ? `from ${fixed(mean(rewards.slice(0, n)), 2)} to ${fixed(mean(rewards.slice(-n)), 2)}` : "mean of the last step";
  $("tiles").replaceChildren(
    tile("Step", count(run.step), "", `version ${run.version ?? "–"}`),
    tile("Reward", fixed(last.reward, 3), "", trend),
    tile("Gate", run.gate.toUpperCase(), "", run.gate === "ok" ? "nothing to report" : `since step ${run.alert?.step ?? "–"}`, gate),
    tile("Mismatch, lag 0", si(lag0?.k3 ?? last.k3_lag0), "nats", lag0 ? `ESS ${percent(lag0.ess)}, Δp ${si(lag0.dp)}` : "k3"),
    tile("Lag", count(last.lag_max), "max", `mean ${fixed(last.lag_mean, 2)} steps`),
    tile("Delta", bytes(last.delta_bytes), "", last.ratio ? `1/${count(last.ratio)} of full` : "–"),
    tile("Swap pause", milliseconds(quantile(pauses, 0.5)), "p50", `p95 ${milliseconds(quantile(pauses, 0.95))}`),
    tile("Tokens / s", count(last.generated_per_s), "generated", `${count(last.trained_per_s)} trained`),
  );
}

function tile(name, value, unit, more, tone = "") {
  const box = element("div");
  box.className = "tile";
  const main = element("div", value);
  main.className = `value ${tone}`;
  if (unit) main.append(element("small", unit));
  const [head, tail] = [element("div", name), element("div", more)];
  head.className = "name";
  tail.className = "more";
  tail.title = more;
  box.append(head, main, tail);
  return box;
}

const TONES = { serving: "good", starting: "warn", draining: "warn", failed: "bad", silent: "bad", trained: "good", void: "warn", dropped: "bad" };

function replicas(list, run) {
  list.sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  const lost = list.reduce((sum, r) => sum + r.lost, 0);
  set("replicas-note", list.length ? `${list.length} known, ${lost} requests lost` : "");
  table("replicas", "No replica has reported in the last ten minutes.", list,
    ["Replica", (r) => r.id, "fill"],
    ["State", (r) => badge(r.state, r.detail)],
    ["Version", (r) => `${r.version ?? "–"}${run && r.run && r.run !== run.id ? ` of ${r.run}` : ""}`],
    ["Behind", (r) => count(r.behind), "num"],
    ["Groups now", (r) => count(r.groups_running), "num"],
    ["Done", (r) => count(r.groups_done), "num"],
    ["Tokens/s", (r) => count(r.tokens_per_s), "num"],
    ["Idle", (r) => percent(r.idle), "num"],
    ["Last pause", (r) => milliseconds(r.pause_ms), "num"],
    ["Engine", (r) => r.engine],
    ["Seen", (r) => (r.age < 5 ? "now" : `${count(r.age)} s ago`), "num"],
  );
}

function topics(list) {
  table("topics", "Lengths are not known yet: Kafka has not answered.", list,
    ["Topic", (t) => t.topic, "fill"],
    ["Messages", (t) => count(t.messages), "num"],
    ["Waiting", (t) => (t.behind < 0 ? "–" : count(t.behind)), "num"],
  );
}

function groups(run) {
  const totals = run?.groups;
  set("groups-note", totals ? `${count(totals.trained)} trained, ${count(totals.void)} void, ${count(totals.dropped)} dropped` : "");
  table("groups", "No group has reached the trainer yet.", run?.last_groups ?? [],
    ["Step", (g) => count(g.step), "num"],
    ["Group", (g) => count(g.sequence), "num"],
    ["Outcome", (g) => badge(g.outcome)],
    ["Reward", (g) => (g.outcome === "trained" ? fixed(g.reward, 3) : "–"), "num"],
    ["Lag", (g) => count(g.lag), "num"],
    ["Tokens", (g) => count(g.tokens), "num"],
    ["Reason", (g) => g.reason, "fill"],
  );
}

function table(id, empty, list, ...columns) {
  if (!list.length) return $(id).replaceChildren(row([element("td", empty)], "muted"));
  const head = element("thead");
  head.append(row(columns.map(([name, , kind]) => cell("th", name, kind))));
  const body = element("tbody");
  body.append(...list.map((item) => row(columns.map(([, value, kind]) => cell("td", value(item), kind)))));
  $(id).replaceChildren(head, body);
}

function row(cells, kind = "") {
  const line = element("tr");
  line.className = kind;
  line.append(...cells);
  return line;
}

function cell(tag, content, kind = "") {
  const box = element(tag);
  box.className = kind;
  box.append(content);
  if (tag === "th") box.scope = "col";
  return box;
}

function badge(text, title = "") {
  const mark = element("span", text);
  mark.className = `badge ${TONES[text] ?? "muted"}`;
  mark.title = title;
  return mark;
}

function element(tag, text = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  return node;
}

function set(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// ---- controls ------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const THEMES = { auto: "◐", light: "☀", dark: "☾" };

function remembered() {
  try {
    return localStorage.getItem("theme") ?? "auto";
  } catch {
    return "auto";
  }
}

function theme(name) {
  try {
    localStorage.setItem("theme", name);
  } catch {
    // Storage may be switched off; the choice then lasts until the page is closed.
  }
  document.documentElement.dataset.choice = name;
  document.documentElement.dataset.theme = name === "auto" ? (dark.matches ? "dark" : "light") : name;
  $("theme").textContent = THEMES[name];
  $("theme").setAttribute("aria-label", `Theme: ${name}`);
  $("theme").title = `Theme: ${name}`;
  cards?.restyle();
}

$("theme").onclick = () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(document.documentElement.dataset.choice) + 1) % names.length]);
};
dark.onchange = () => theme(document.documentElement.dataset.choice);

$("run").onchange = () => {
  const run = $("run").value;
  history.replaceState(null, "", run ? `?run=${encodeURIComponent(run)}` : location.pathname);
  connect();
};

for (const button of document.querySelectorAll(".range button")) {
  button.onclick = () => {
    for (const other of document.querySelectorAll(".range button")) other.ariaPressed = String(other === button);
    cards.showLast(Number(button.dataset.last));
  };
}

const asked = new URLSearchParams(location.search).get("theme");
theme(asked in THEMES ? asked : remembered());
cards = makeCards($("charts"), CHARTS);
connect();
