"use strict";
// Shows the steps of one answer. Shared by the page and by the files that it saves; texts of people
// and of the model enter the document as text nodes only.
const FRAME_MS = 120, SLOW_MS = 480;
const stillWanted = matchMedia("(prefers-reduced-motion: reduce)");
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// An element; `told` are properties, or attributes where the name has a dash or is `role`.
function make(tag, told = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(told)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

// --- one text: its steps, as they arrive ---------------------------------------------------------

// A step is what stood after a forward: `chars` of the text are settled, and behind `at` settled tokens
// is a window of `size` cells, of which `set` and `clear` changed. `isKnown`: the server told `nfe`.
// `forced`: tokens of the answer, by place, for which a call's grammar left no choice; known at its end.
const newLane = (name, body) => ({
  name, body, text: "", thoughts: "", calls: [], isDone: false, isStopped: false,
  steps: [{ nfe: 0, isKnown: true, at: 0, size: 0, chars: 0, thoughts: 0, calls: [], set: [], clear: [] }],
});

// How much of a lane has settled.
const extent = ({ text, thoughts, calls }) => ({ chars: text.length, thoughts: thoughts.length, calls: calls.map((call) => call.text.length) });

function hear(lane, event) {
  const last = lane.steps.at(-1);
  for (const choice of event.choices || []) {
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta || { content: choice.text };
    lane.text += content || "";
    lane.thoughts += thought || "";
    for (const { index, id, function: { name, arguments: piece } } of calls || []) (lane.calls[index] ??= { id, name, text: "" }).text += piece;
    if (content || thought || calls) {
      if (last.isKnown) lane.steps.push({ nfe: last.nfe + 1, isKnown: false, at: last.at, size: last.size, set: [], clear: [] });
      Object.assign(lane.steps.at(-1), extent(lane));
    }
    if (choice.finish_reason) Object.assign(lane, { finish: choice.finish_reason, reason: choice.stop_reason });
  }
  if (event.diffusion) {
    const { nfe, at, size, set, clear } = event.diffusion, open = lane.steps.at(-1);
    if (open.isKnown && open.nfe < nfe) lane.steps.push(extent(lane));
    const step = lane.steps.at(-1);
    step.set = [...(step.set || []), ...set]; // a later entry of one cell wins
    step.clear = [...(step.clear || []), ...clear];
    Object.assign(step, { nfe, at, size, isKnown: true });
  }
  if (event.dllm) Object.assign(lane, event.dllm);
  if (event.usage) lane.usage = event.usage;
  if (event.metrics) lane.metrics = event.metrics;
}

// The text has ended, however it did: nothing is open any more.
function close(lane) {
  if (lane.isDone) return;
  let last = lane.steps.at(-1);
  if (last.isKnown) lane.steps.push((last = { nfe: last.nfe + 1, ...extent(lane), set: [], clear: [] }));
  const nfe = lane.metrics ? lane.metrics.nfe : last.nfe;
  for (const step of lane.steps) step.nfe = Math.min(step.nfe, nfe);
  Object.assign(last, { nfe, isKnown: Boolean(lane.metrics), size: 0 });
  lane.isDone = true;
}

// Cells of the window after a step: a text, or null for a hole.
function cellsAt(lane, index) {
  const held = new Map(), { at, size } = lane.steps[index];
  for (const step of lane.steps.slice(0, index + 1)) {
    for (const cell of step.clear) held.delete(cell);
    for (const [cell, piece] of step.set) held.set(cell, piece);
  }
  return Array.from({ length: size }, (_, i) => held.get(at + i) ?? null);
}

const REASONS = { nfe: "limit of forwards", repetition: "repetition", deadline: "time limit" };

function ending(lane) {
  if (lane.error) return "error";
  if (lane.isStopped) return "stopped";
  if (!lane.finish) return "ended early";
  if (lane.finish === "tool_calls") return plural(lane.calls.length, "call");
  if (lane.finish === "stop") return lane.reason == null ? "end of text" : "stop string";
  return REASONS[lane.reason] || "limit of tokens";
}

// --- calls of tools ------------------------------------------------------------------------------

// The arguments of a call; null while they are not whole.
function argumentsOf(text) {
  try { return JSON.parse(text); } catch { return null; }
}

const wholeCalls = (lane) => lane.calls.filter((call) => argumentsOf(call.text));

function callCard(name, text, told) {
  const given = argumentsOf(text), shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const rows = Object.entries(given || {}).map(([key, value]) => make("tr", {}, make("th", { scope: "row" }, key), make("td", { dir: "auto" }, shown(value))));
  return make("section", { className: "call", "aria-label": `Call of ${name}` }, make("h4", {}, name), given ? make("table", {}, ...rows) : make("pre", {}, text), make("p", { className: "note" }, told));
}

function drawCalls(parts, lane, step) {
  const count = lane.usage?.completion_tokens_details?.reasoning_tokens;
  parts.thoughts.hidden = !step.thoughts;
  parts.thoughts.firstChild.textContent = count ? `Thoughts · ${plural(count, "token")}` : "Thoughts";
  parts.thoughts.lastChild.textContent = lane.thoughts.slice(0, step.thoughts);
  const held = lane.notes?.length ? `held to its schema, but for ${lane.notes.join("; ")}` : "held to its schema";
  parts.calls.replaceChildren(...step.calls.map((size, i) => {
    const { name, text } = lane.calls[i], said = text.slice(0, size);
    return callCard(name, said, argumentsOf(said) ? held : lane.isDone && size === text.length ? "cut by the limit: not delivered" : "");
  }));
}

// --- figures and legend --------------------------------------------------------------------------

const number = (value, digits) => (value == null ? "–" : value.toFixed(digits));

function drawFigures(box, lane) {
  const { metrics, usage } = lane;
  box.replaceChildren();
  if (!metrics) return;
  const big = (value, name) => make("p", { className: "big" }, make("b", {}, value), ` ${name}`);
  const rows = [
    ["Forwards", String(metrics.nfe)],
    ["Tokens", usage ? String(usage.completion_tokens) : "–"],
    ["First block", `${number(metrics.time_to_first_token_ms / 1000, 2)} s`],
    ["Waited for a slot", `${number(metrics.queue_time_ms / 1000, 2)} s`],
    ["Prompt tokens", usage ? String(usage.prompt_tokens) : "–"],
    ["Of them cached", usage && usage.prompt_tokens_details ? String(usage.prompt_tokens_details.cached_tokens) : "–"],
  ];
  box.append(
    big(number(metrics.tokens_per_forward, 1), "tokens per forward"),
    big(number(metrics.tokens_per_second, 0), "tokens a second"),
    make("dl", {}, ...rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)))),
  );
}

function drawLegend(box) {
  const row = (className, sample, told) => make("li", {}, make("span", { className }, sample), ` ${told}`);
  box.replaceChildren(make("ul", {},
    row("cell", "provisional", "may still change"), row("cell new", "bold", "written in this forward"),
    row("cell forced", "forced", "by a tool's schema, no other text fits"), row("hole", "··", "has no token yet"), row("fresh", "settled", "in this forward, for good")));
}

// --- one answer ----------------------------------------------------------------------------------

// Its lanes on one time line of forwards. `onPick` is called when the reader turns to it.
class Answer {
  constructor(run, { onPick = () => {}, onDraw = () => {}, actions = [] } = {}) {
    this.run = run;
    this.onDraw = onDraw;
    this.shown = 0; // an index into `marks`
    this.isFollowing = true;
    this.timer = null;
    this.title = make("h2", { className: "who" });
    this.play = make("button", { type: "button", className: "play", onclick: () => this.toggle() });
    this.slider = make("input", { type: "range", min: 0, value: 0, step: 1, "aria-label": "Step of the answer" });
    this.slider.addEventListener("input", () => {
      const asked = Number(this.slider.value); // drawing writes it
      this.pause();
      this.show(asked);
    });
    this.slider.addEventListener("keydown", (event) => {
      if (event.key === " ") { event.preventDefault(); this.toggle(); }
    });
    this.where = make("span", { className: "where" });
    this.slow = make("input", { type: "checkbox" });
    this.bar = make("div", { className: "bar" }, this.play, this.slider, this.where,
      make("label", { className: "check" }, this.slow, " slow motion"));
    this.lanes = run.lanes.map((lane) => this.makeLane(lane));
    this.acts = make("div", { className: "row acts" }, ...actions.map(([name, act]) => make("button", { type: "button", onclick: () => act(this) }, name)));
    this.box = make("article", { className: "answer" }, this.title, this.bar,
      make("div", { className: run.lanes.length > 1 ? "lanes several" : "lanes" }, ...this.lanes.map((one) => one.box)),
      this.acts);
    this.box.addEventListener("focusin", () => onPick(this));
    this.draw();
  }

  makeLane(lane) {
    const parts = {
      lane,
      name: make("h3", { hidden: this.run.lanes.length < 2 }),
      thoughts: make("details", { className: "thoughts" }, make("summary"), make("p", { className: "text", dir: "auto" })), calls: make("div"),
      settled: make("span"), fresh: make("span", { className: "fresh" }),
      caption: make("p", { className: "caption" }), cells: make("div", { className: "cells", dir: "auto", "aria-hidden": "true" }),
      note: make("p", { className: "note" }), fault: make("p", { className: "fault", role: "alert", hidden: true }),
    };
    parts.window = make("div", { className: "window" }, parts.caption, parts.cells);
    const text = make("p", { className: "text", dir: "auto" }, parts.settled, parts.fresh);
    parts.box = make("section", { className: "lane" }, parts.name, parts.thoughts, text, parts.calls, parts.window, parts.note, parts.fault);
    return parts;
  }

  // Numbers of forwards after which something is known to have changed.
  get marks() {
    const found = new Set(this.run.lanes.flatMap((lane) => lane.steps.map((step) => step.nfe)));
    return [...found].sort((one, other) => one - other);
  }

  get isDone() { return this.run.lanes.every((lane) => lane.isDone); }

  // A step has arrived, or the last one has.
  grow() {
    if (!this.isFollowing) return this.draw();
    if (!stillWanted.matches) return this.timer ? undefined : this.advance();
    this.show(this.marks.length - 1);
    if (this.isDone) this.pause();
  }

  // Shows one step at a time, however fast they come.
  advance() {
    const last = this.marks.length - 1;
    this.timer = null;
    if (this.shown < last) this.show(this.shown + 1);
    if (this.isDone && this.shown >= last) return this.pause();
    this.timer = setTimeout(() => this.advance(), this.slow.checked ? SLOW_MS : FRAME_MS);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.isFollowing = false;
    this.draw();
  }

  toggle() {
    if (this.isFollowing) return this.pause();
    if (this.isDone && this.shown >= this.marks.length - 1) this.shown = 0;
    this.isFollowing = true;
    this.draw();
    this.timer = setTimeout(() => this.advance(), FRAME_MS);
  }

  // The end, at once.
  finish() {
    this.shown = this.marks.length - 1;
    this.pause();
  }

  show(index) {
    this.shown = Math.min(Math.max(index, 0), this.marks.length - 1);
    this.draw();
  }

  draw() {
    const { marks } = this, last = marks.length - 1, at = marks[Math.min(this.shown, last)];
    const isEnd = this.isDone && this.shown >= last, main = this.run.lanes.at(-1);
    const open = this.lanes.map((parts) => this.drawLane(parts, at, isEnd));
    this.title.textContent = `Model · ${isEnd ? ending(main) : main.steps.length < 2 && !this.isDone ? "waiting" : "denoising"}`;
    this.bar.hidden = this.acts.hidden = this.isDone && this.run.lanes.every((lane) => lane.error && lane.steps.length < 3);
    this.slider.max = last;
    this.slider.value = this.shown;
    const total = Math.max(...this.run.lanes.map((lane) => lane.steps.findLast((step) => step.isKnown).nfe));
    this.where.textContent = at > total ? "the end" : this.isDone ? `forward ${at} of ${total}` : `forward ${at}`;
    this.slider.setAttribute("aria-valuetext", `${this.where.textContent}, ${open.map((count) => `${count} open`).join(" and ")}`);
    const isPlaying = this.isFollowing && !isEnd;
    this.play.textContent = isPlaying ? "❚❚" : "▶\ufe0e";
    this.play.setAttribute("aria-label", isPlaying ? "Pause" : "Play the steps");
    this.onDraw(this);
  }

  // Draws the lane as it stood after forward `at`; how many cells are open.
  drawLane(parts, at, isEnd) {
    const { lane } = parts, isOver = lane.isDone && at >= lane.steps.at(-1).nfe;
    const found = lane.steps.findLastIndex((step) => step.nfe <= at), index = isOver ? lane.steps.length - 1 : Math.max(found, 0);
    const step = lane.steps[index], before = lane.steps[Math.max(index - 1, 0)];
    const from = isEnd || (isOver && at > step.nfe) ? step.chars : before.chars;
    const lead = lane.text.startsWith(" ") ? 1 : 0; // many models begin with a space
    parts.settled.textContent = lane.text.slice(lead, from);
    parts.fresh.textContent = lane.text.slice(Math.max(from, lead), step.chars);
    drawCalls(parts, lane, step);
    const cells = isOver ? [] : cellsAt(lane, index), numOpen = cells.filter((cell) => cell === null).length;
    const changed = new Set(step.set.map(([cell]) => cell)), forced = new Set(lane.forced);
    const kind = (cell) => `cell${changed.has(cell) ? " new" : ""}${forced.has(cell) ? " forced" : ""}`;
    parts.window.hidden = !cells.length;
    parts.caption.textContent = `window · ${plural(cells.length, "token")}, ${numOpen} still open`;
    parts.cells.replaceChildren(...cells.map((piece, i) =>
      piece === null ? make("span", { className: "hole" }, "··") : make("span", { className: kind(step.at + i) }, piece)));
    const rate = lane.metrics ? ` · ${number(lane.metrics.tokens_per_forward, 1)} tokens per forward, ${plural(lane.metrics.nfe, "forward")}` : "";
    parts.name.replaceChildren(make("b", {}, lane.name), rate);
    if (parts.fault.textContent !== (lane.error || "")) parts.fault.textContent = lane.error;
    parts.fault.hidden = !lane.error;
    parts.note.textContent = lane.note || "";
    return numOpen;
  }
}

// --- what was asked ------------------------------------------------------------------------------

const WHO = { user: "You", assistant: "Model", system: "System", tool: "Result", prompt: "Prompt", suffix: "Text behind the hole" };
const turnBox = ({ role, content, tool_calls: calls = [] }) => make("article", { className: `turn ${role}` }, make("h2", { className: "who" }, WHO[role] || role),
  make("p", { className: "text", dir: "auto" }, content || ""), ...calls.map((call) => callCard(call.function.name, call.function.arguments, "")));

// A command that repeats the request of the last lane, seed and all; the answer comes whole.
function curlOf(run) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const { stream, stream_mode, stream_options, ...body } = run.lanes.at(-1).body;
  const lines = [`curl ${quoted(run.url)}`, "-H 'Content-Type: application/json'"];
  if (run.hasKey) lines.push('-H "Authorization: Bearer $DLLM_API_KEY"');
  return [...lines, `-d ${quoted(JSON.stringify(body))}`].join(" \\\n  ");
}

async function copyCurl(answer) {
  const command = curlOf(answer.run);
  try {
    await navigator.clipboard.writeText(command);
    answer.onCopied();
  } catch { // no clipboard on plain HTTP hosts, or it was refused
    answer.onManual(command);
  }
}

// --- a saved file --------------------------------------------------------------------------------

function startSaved(run) {
  const figures = make("section", { id: "figures", "aria-label": "Figures" }), legend = make("div", { className: "legend" });
  const answer = new Answer(run, { actions: [["Copy curl", copyCurl]] });
  const told = make("p", { role: "status" });
  answer.onCopied = () => { told.textContent = "The command is in the clipboard."; };
  answer.onManual = (command) => answer.box.append(make("pre", {}, command));
  answer.isFollowing = false;
  document.body.append(
    make("header", {}, make("h1", {}, `How ${run.strategy} wrote this text`), make("p", { id: "model" }, [run.model, `block ${run.block}`, `window ${run.window}`, ...run.settings, run.when].join(" · "))),
    make("main", { id: "talk" }, ...run.turns.map(turnBox), answer.box, told),
    make("aside", { id: "side" }, figures, legend));
  drawFigures(figures, run.lanes.at(-1));
  drawLegend(legend);
  answer.show(0);
}

const saved = document.getElementById("run");
if (saved) startSaved(JSON.parse(saved.textContent));
