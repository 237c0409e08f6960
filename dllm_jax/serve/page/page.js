"use strict";
// Asks the server and shows what comes. Runs after replay.js, which draws answers.
const byId = (id) => document.getElementById(id);
const prompt = byId("prompt"), talk = byId("talk"), side = byId("side"), settings = byId("settings");
const NAMES = {
  accept_threshold: "Accept above", add_block_threshold: "Open next block at", semi_complete_threshold: "Semi-complete at",
  edit_threshold: "Edit above", entropy_bound: "Bound of entropy", token_stability_threshold: "Stable above",
  commit_confidence: "Commit above", token_merge_weight: "Weight of merged tokens",
};
const ONE_A_FORWARD = { accept_threshold: 1 }; // nothing is above it: the surest token alone
const HEALTH_MS = 1000, READY_HEALTH_MS = 15000, SEED_RANGE = 2 ** 31;
const SAMPLES = { // tools that the built-in model has room for
  Weather: ["get_weather", "Weather of a place", { city: { type: "string", enum: ["Oslo", "Bergen", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 7 } }, ["city"]],
  Sum: ["add", "Adds two whole numbers", { a: { type: "integer" }, b: { type: "integer" } }, ["a", "b"]],
  Note: ["save_note", "Keeps a note", { text: { type: "string", maxLength: 40 }, tags: { type: "array", items: { enum: ["home", "work"] }, maxItems: 2 } }, ["text"]],
};
let model = null, key = "", turns = [], pending = null, live = null, picked = null, theme = null, unsaid = "";

// --- the server ----------------------------------------------------------------------------------

const basic = () => `Basic ${btoa(String.fromCharCode(...new TextEncoder().encode(`:${key}`)))}`;

// Fetch with the key, which is asked for while the server refuses it.
async function call(path, body, signal) {
  for (;;) {
    const headers = { Accept: "application/json", ...(key && { Authorization: basic() }), ...(body && { "Content-Type": "application/json" }) };
    const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store", credentials: key ? "omit" : "same-origin" });
    if (answer.status !== 401 || !(await askKey())) return answer;
  }
}

let asking = null; // one dialog, however many requests wait for it

function askKey() {
  asking ??= new Promise((done) => {
    const box = byId("key-box");
    byId("key-told").textContent = key ? "The server refused that key." : "It stays in the memory of this tab.";
    box.returnValue = "";
    box.addEventListener("close", () => {
      key = byId("key").value.trim();
      byId("key").value = "";
      asking = null;
      done(box.returnValue === "use" && key !== "");
    }, { once: true });
    box.showModal();
  });
  return asking;
}

// A refusal in words, and its code.
async function refusal(answer) {
  let error = {};
  try { error = (await answer.json()).error || {}; } catch { /* no JSON: a proxy's answer */ }
  const wait = answer.headers.get("retry-after");
  const said = error.message || `status ${answer.status}, without a reason`;
  const later = wait && answer.status >= 429 ? ` Try again in ${wait} s.` : "";
  const who = answer.status === 429 ? "The server is busy" : answer.status === 503 ? "The server is not ready" : answer.status >= 500 ? "The server failed" : "The server refused this";
  return Object.assign(new Error(`${who}: ${said}.${later}`), { code: error.code });
}

// The JSON of a stream's events.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

async function watchHealth() {
  let told = "no answer", state = "failed", wait = HEALTH_MS;
  try {
    const health = await (await fetch("health", { cache: "no-store" })).json();
    state = health.status;
    told = state === "starting" && health.of ? `starting, ${health.done} of ${health.of} programs compiled` : state;
    if (state === "ready") {
      if (!model) await loadModel();
      wait = READY_HEALTH_MS;
    }
  } catch { /* the next look may find it */ }
  if (byId("state").textContent !== told) byId("state").textContent = told;
  byId("state").dataset.state = state;
  setTimeout(watchHealth, wait);
}

async function loadModel() {
  const answer = await call("v1/models");
  if (!answer.ok) return;
  [model] = (await answer.json()).data;
  const { strategy, block_size, window, chat, tools, infill, thresholds, about, examples } = model.dllm;
  byId("about").textContent = about || "";
  byId("examples").replaceChildren(...(chat && examples || []).map(makeExample));
  byId("model").textContent = `${model.id} · ${strategy} · block ${block_size} × ${Math.max(1, Math.round(window / block_size))}`;
  document.title = `dllm_jax · ${model.id}`;
  byId("most").value = Math.min(512, Math.floor(model.max_model_len / 2));
  const [chatKind, completionKind] = settings.elements.mode;
  chatKind.disabled = !chat;
  (chat ? chatKind : completionKind).checked = true;
  byId("behind").dataset.infill = infill ? "yes" : "";
  byId("offer").hidden = !tools;
  byId("beside").disabled = !("accept_threshold" in thresholds);
  byId("thresholds").replaceChildren(...Object.entries(thresholds).map(makeThreshold));
  showMode();
}

function makeExample(text) {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", () => {
    settings.elements.mode.value = "chat";
    showMode();
    prompt.value = text;
    send();
  });
  return button;
}

// --- settings of the next message ----------------------------------------------------------------

function makeThreshold([name, { value, low, high }]) {
  const least = low ?? 0, most = high ?? (value > 1 ? 2 * value : 1);
  const exact = make("input", { type: "number", name, step: "any", value, title: name, "aria-label": `${NAMES[name] || name}, exact` });
  if (low !== null) exact.min = low;
  if (high !== null) exact.max = high;
  const slider = make("input", { type: "range", min: least, max: most, step: 0.01, value });
  slider.addEventListener("input", () => { exact.value = slider.value; });
  exact.addEventListener("input", () => { if (exact.value !== "") slider.value = exact.value; });
  const reset = () => { exact.value = slider.value = value; };
  byId("usual").addEventListener("click", reset);
  return make("div", { className: "threshold" }, make("label", { title: name }, NAMES[name] || name.replaceAll("_", " "), slider), exact);
}

// --- tools ---------------------------------------------------------------------------------------

// What the field offers, as the route reads it; null where it is no list of tools.
function offeredTools() {
  const box = byId("tools");
  let found = [];
  try {
    found = box.value.trim() ? [JSON.parse(box.value)].flat().map((one) => (one.function ? one : { type: "function", function: one })) : [];
    if (found.some((one) => !one.function.name)) throw new Error("a tool has no name");
    box.setCustomValidity("");
  } catch (error) {
    box.setCustomValidity(`This is no list of tools: ${error.message}`);
    return null;
  }
  return found;
}

function showChoices() {
  const names = (offeredTools() || []).map((one) => one.function.name), was = byId("choice").value;
  const options = ["auto", "required", "none", ...names.map((name) => `only ${name}`)];
  byId("choice").replaceChildren(...options.map((one) => make("option", {}, one)));
  byId("choice").value = options.includes(was) ? was : "auto";
}

function makeSample([label, [name, description, properties, required]]) {
  const button = make("button", { type: "button" }, label);
  button.addEventListener("click", () => {
    const others = (offeredTools() || []).filter((one) => one.function.name !== name);
    const own = { type: "function", function: { name, description, parameters: { type: "object", properties, required } } };
    byId("tools").value = JSON.stringify([...others, own], null, 1);
    showChoices();
  });
  return button;
}

function toolFields() {
  const tools = isChat() && !byId("offer").hidden ? offeredTools() : [];
  if (!tools?.length) return {};
  const choice = byId("choice").value, name = choice.startsWith("only ") && choice.slice(5);
  return { tools, tool_choice: name ? { type: "function", function: { name } } : choice };
}

// A box for the result of each call; the next message takes them with it.
function askResults(answer, calls) {
  const boxes = calls.map(() => make("textarea", { rows: 2 }));
  const labels = calls.map((call, i) => make("label", {}, `Result of ${call.name} `, boxes[i]));
  const form = make("form", { className: "results" }, ...labels, make("div", { className: "row" }, make("button", { className: "main" }, calls.length > 1 ? "Send results" : "Send result")));
  form.addEventListener("submit", (event) => { event.preventDefault(); send(true); });
  pending = { form, turns: () => calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: boxes[i].value })) };
  answer.box.append(form);
}

const isChat = () => settings.elements.mode.value === "chat";

function showMode() {
  prompt.placeholder = isChat() ? "Ask something" : "Begin a text; the model goes on";
  byId("behind").hidden = isChat() || !byId("behind").dataset.infill;
}

// The fields of the request beside its text; null where a setting is out of its range.
function fields() {
  const wrong = Array.from(settings.querySelectorAll("input, textarea")).find((input) => !input.checkValidity());
  if (wrong) {
    if (!byId("more").checkVisibility() || side.classList.contains("open")) wrong.reportValidity();
    else openSide(true, wrong);
    return null;
  }
  const asNumber = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const told = { seed: asNumber("seed") ?? Math.floor(Math.random() * SEED_RANGE), max_tokens: asNumber("most"), temperature: asNumber("temperature") };
  const changed = {};
  for (const input of byId("thresholds").querySelectorAll("input[type=number]"))
    if (input.value !== "" && Number(input.value) !== model.dllm.thresholds[input.name].value) changed[input.name] = Number(input.value);
  return { ...told, ...(Object.keys(changed).length && { strategy_overrides: changed }), ...toolFields() };
}

// --- a message -----------------------------------------------------------------------------------

async function send(hasResults = false) {
  const content = prompt.value;
  if (live || !(content.trim() || hasResults)) return;
  if (!model) return note("The engine is not ready yet; the line above tells how far it is.");
  const told = fields();
  if (!told) return;
  note("");
  if (picked) picked.finish();
  const run = makeRun(content, told, pending ? pending.turns() : []);
  if (pending) pending.form.remove();
  pending = null;
  const answer = new Answer(run, {
    onPick: pick, onDraw: follow, actions: [["Save as page", saveRun], ["Copy curl", copyCurl]],
  });
  answer.onCopied = () => note("The command is in the clipboard.");
  answer.onManual = showCommand;
  byId("empty").hidden = true;
  talk.append(...run.turns.slice(run.numBefore).map(turnBox), answer.box);
  prompt.value = "";
  grow();
  const control = new AbortController();
  setLive({ answer, control });
  unsaid = "";
  pick(answer);
  talk.scrollTop = talk.scrollHeight;
  await Promise.all(run.lanes.map((lane) => ask(lane, run, answer, control.signal)));
  const main = run.lanes.at(-1);
  say("", true);
  setLive(null);
  if (isSame(answer)) drawFigures(byId("figures"), main);
  const calls = wholeCalls(main).map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  if (run.kind === "chat" && (main.text || calls.length)) {
    const own = { ...(calls.length && { tool_calls: calls }), ...(main.thoughts && { reasoning_content: main.thoughts }) };
    turns = [...run.turns, { role: "assistant", content: main.text, ...own }];
    if (calls.length) askResults(answer, wholeCalls(main));
    follow(answer);
  }
  if (!main.text && main.error && !prompt.value) {
    prompt.value = content;
    grow();
    talk.scrollTop = talk.scrollHeight;
  }
}

function makeRun(content, told, results) {
  const kind = isChat() ? "chat" : "completion", { strategy, block_size, window } = model.dllm;
  const suffix = byId("behind").hidden ? "" : byId("suffix").value;
  const asked = kind === "chat" ? [...turns, ...results, ...(content.trim() ? [{ role: "user", content }] : [])]
    : [{ role: "prompt", content }, ...(suffix ? [{ role: "suffix", content: suffix }] : [])];
  const what = kind === "chat" ? { messages: asked } : { prompt: content, ...(suffix && { suffix }) };
  const body = { model: model.id, ...what, ...told, stream: true, stream_mode: "denoise", stream_options: { include_usage: true } };
  const lanes = [newLane(strategy, body)];
  if (byId("beside").checked) {
    const overrides = { ...told.strategy_overrides, ...ONE_A_FORWARD };
    lanes.unshift(newLane("one token a forward", { ...body, strategy_overrides: overrides }));
  }
  const path = kind === "chat" ? "v1/chat/completions" : "v1/completions";
  const thresholds = Object.entries(model.dllm.thresholds).map(([name, { value }]) => `${name} ${told.strategy_overrides?.[name] ?? value}`);
  return {
    kind, path, lanes, turns: asked, numBefore: kind === "chat" ? turns.length : 0, model: model.id, strategy, block: block_size, window,
    settings: [...thresholds, `seed ${told.seed}`], when: new Date().toISOString().slice(0, 10),
    url: new URL(path, document.baseURI).href, hasKey: document.documentElement.dataset.key === "yes" || key !== "",
  };
}

// One lane's request, until its stream has ended.
async function ask(lane, run, answer, signal) {
  try {
    let response = await call(run.path, lane.body, signal);
    if (!response.ok) {
      const why = await refusal(response);
      if (why.code !== "denoise_busy") throw why;
      lane.note = "Other viewers watch the window now; this answer shows settled text alone.";
      const { stream_mode, ...plain } = lane.body;
      response = await call(run.path, plain, signal);
      if (!response.ok) throw await refusal(response);
    }
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(`The server failed: ${event.error.message}.`);
      const before = lane.text.length, numCalls = lane.calls.length;
      hear(lane, event);
      if (lane === run.lanes.at(-1)) say(lane.text.slice(before));
      if (lane === run.lanes.at(-1) && lane.calls.length > numCalls) say(`The model calls ${lane.calls.at(-1).name}.`, true);
      answer.grow();
    }
  } catch (error) {
    if (signal.aborted) lane.isStopped = true;
    else lane.error = error instanceof TypeError ? "The server does not answer. Is it still running?" : error.message;
  }
  close(lane);
  answer.grow();
}

function stop() {
  if (live) live.control.abort();
}

function setLive(next) {
  live = next;
  byId("send").textContent = live ? "Stop" : "Send";
  byId("send").classList.toggle("stop", Boolean(live));
}

// --- what is told beside the answer ----------------------------------------------------------------

// Settled sentences, for those who hear the page.
function say(piece, isEnd = false) {
  unsaid += piece;
  const end = isEnd ? unsaid.length : Math.max(...[". ", "! ", "? ", "\n", "。"].map((mark) => unsaid.lastIndexOf(mark) + mark.length * unsaid.includes(mark)));
  const sentence = unsaid.slice(0, Math.max(end, 0)).trim();
  if (end > 0) unsaid = unsaid.slice(end);
  if (!sentence) return;
  byId("said").append(make("p", {}, sentence));
  while (byId("said").children.length > 20) byId("said").firstChild.remove();
}

const note = (text) => { byId("note").textContent = text; };
const isSame = (answer) => picked === answer;

function pick(answer) {
  picked = answer;
  const lane = answer.run.lanes.at(-1);
  drawFigures(byId("figures"), lane);
  const { metrics } = lane;
  byId("short").replaceChildren(...(metrics ? [make("b", {}, number(metrics.tokens_per_forward, 1)), " tokens per forward  ", make("b", {}, number(metrics.tokens_per_second, 0)), " a second"] : []));
}

// Keeps the end in view while the newest answer plays.
function follow(answer) {
  if (picked === answer && answer.isDone) pick(answer);
  const isLast = answer.box === talk.lastElementChild;
  if (isLast && answer.isFollowing) talk.scrollTop = talk.scrollHeight;
}

function showCommand(command) {
  byId("copy-text").value = command;
  byId("copy-box").showModal();
  byId("copy-text").select();
}

// One HTML file that replays the answer and asks for nothing.
async function saveRun(answer) {
  try {
    const [style, script] = await Promise.all(["page/page.css", "page/replay.js"].map(async (path) => {
      const response = await call(path);
      if (!response.ok) throw await refusal(response);
      return response.text();
    }));
    const link = make("a", { download: `denoise-${answer.run.lanes.at(-1).body.seed}.html` });
    link.href = URL.createObjectURL(new Blob([savedPage(answer.run, style, script)], { type: "text/html" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    note(`Saved as ${link.download}.`);
  } catch (error) {
    note(error instanceof TypeError ? "The server does not answer; nothing was saved." : error.message);
  }
}

function savedPage(run, style, script) {
  const { path, numBefore, ...kept } = run;
  const policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";
  // No parser of HTML takes these characters for markup, neither in a title nor in a script.
  const escaped = (text, as) => text.replace(/[<>&\u2028\u2029]/g, (char) => as(char.charCodeAt(0)));
  const title = escaped(`How ${run.strategy} wrote a text`, (code) => `&#${code};`);
  const json = escaped(JSON.stringify(kept), (code) => `\\u${code.toString(16).padStart(4, "0")}`);
  return [
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">', '<meta name="viewport" content="width=device-width, initial-scale=1">',
    `<meta http-equiv="Content-Security-Policy" content="${policy}">`, `<title>${title}</title>`, `<style>\n${style}</style>`,
    '</head>\n<body class="saved">', `<script type="application/json" id="run">${json}</script>`, `<script>\n${script}</script>`, "</body>\n</html>\n",
  ].join("\n");
}

// --- keys and buttons ------------------------------------------------------------------------------

function openSide(isOpen, focus) {
  side.classList.toggle("open", isOpen);
  byId("more").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) (focus || byId("close")).focus();
  else byId("more").focus();
}

function onKey(event) {
  if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const isTyping = /^(TEXTAREA|SELECT)$/.test(event.target.tagName) || (event.target.tagName === "INPUT" && event.target.type === "number");
  if (event.key === "Escape" && side.classList.contains("open")) openSide(false);
  else if (event.key === "Escape") stop();
  else if (event.key === "/" && !isTyping) prompt.focus();
  else if (event.key === "Enter" && !event.shiftKey && event.target === prompt) send();
  else return;
  event.preventDefault();
}

// The box grows with its lines.
function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 5)}px`;
}

function setTheme(next) {
  theme = next;
  document.documentElement.style.colorScheme = next || "";
  try { localStorage.setItem("dllm-theme", next || ""); } catch { /* a browser may refuse */ }
}

function start() {
  for (const legend of document.querySelectorAll(".legend")) drawLegend(legend);
  try { setTheme(localStorage.getItem("dllm-theme")); } catch { /* a browser may refuse */ }
  byId("theme").addEventListener("click", () => {
    const isDark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    setTheme(isDark ? "light" : "dark");
  });
  byId("ask").addEventListener("submit", (event) => { event.preventDefault(); if (live) stop(); else send(); });
  settings.addEventListener("submit", (event) => event.preventDefault());
  byId("samples").append(...Object.entries(SAMPLES).map(makeSample));
  byId("tools").addEventListener("input", showChoices);
  showChoices();
  byId("mode").addEventListener("change", showMode);
  byId("usual").addEventListener("click", () => { byId("temperature").value = byId("seed").value = ""; });
  byId("new").addEventListener("click", () => {
    stop();
    turns = [];
    picked = pending = null;
    for (const box of talk.querySelectorAll("article")) box.remove();
    byId("empty").hidden = false;
    byId("figures").replaceChildren();
    byId("short").replaceChildren();
    prompt.focus();
  });
  byId("more").addEventListener("click", () => openSide(!side.classList.contains("open")));
  byId("close").addEventListener("click", () => openSide(false));
  prompt.addEventListener("input", grow);
  document.addEventListener("keydown", onKey);
  watchHealth();
}

start();
