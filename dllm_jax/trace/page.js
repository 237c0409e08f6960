"use strict";
// Replays the frames of a text. Everything that comes from the model goes into the page as text.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const STATES = ["□ not open", "◐ active", "▶ to cache"];
const CACHED = "■ cached", FRAME_MS = 650, HOLE = -1;
// Lower edges of the five colours, in thousandths.
const EDGES = [0, 500, 700, 900, 970];

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- what stands where, frame by frame ----------------------------------------------------------

const looks = []; // of each frame: position -> {token, share, since}
for (const [i, frame] of data.frames.entries()) {
  const look = new Map(i ? looks[i - 1] : []);
  for (const [position, token, share] of frame.put) {
    const old = look.get(position);
    const since = old && old.token === token ? old.since : i;
    if (token === HOLE) look.delete(position);
    else look.set(position, { token, share, since });
  }
  looks.push(look);
}
const isLast = (i) => i === data.frames.length - 1;
const percent = (share) => (share < 0 ? "probability not asked" : `probability ${(share / 10).toFixed(1)} %`);
const named = (token) => (data.pieces[token] ? data.pieces[token][0] : `[${token}]`);

// --- the cells, made once -----------------------------------------------------------------------

const cells = new Map(); // position -> element
const blocks = [];
let index = 0, picked = null, timer = null;

function makeBoard() {
  const board = byId("board");
  const size = data.blockSize || data.end - data.first;
  board.classList.toggle("flow", !data.blockSize);
  for (let at = data.first; at < data.end; at += size) {
    const block = { at, end: Math.min(at + size, data.end), box: element("div", "block") };
    block.state = element("span", "state");
    block.here = element("span", "here");
    const head = element("div", "head");
    const title = data.blockSize ? `block ${(at - data.first) / size + 1}` : "cells";
    head.append(element("span", "", title), element("span", "", `positions ${at} to ${block.end - 1}`), block.state, block.here);
    const grid = element("div", "cells");
    for (let position = at; position < block.end; position++) {
      const cell = element("div", "cell");
      cell.dir = "auto";
      cell.addEventListener("click", () => { picked = picked === position ? null : position; draw(); });
      cells.set(position, cell);
      grid.append(cell);
    }
    block.box.append(head, grid);
    board.append(block.box);
    blocks.push(block);
  }
}

// --- one frame ----------------------------------------------------------------------------------

function draw() {
  const frame = data.frames[index], look = looks[index];
  const accepted = new Set(frame.accepted), edited = new Map(frame.edited);
  const guesses = new Map(frame.guesses.map(([position, token, share]) => [position, { token, share }]));
  const windowEnd = frame.start + data.windowSize;
  for (const block of blocks) drawBlock(block, frame, windowEnd);
  for (const [position, cell] of cells) {
    const inside = position >= frame.start && position < windowEnd;
    drawCell(cell, position, look.get(position), guesses.get(position), accepted.has(position), edited.get(position), inside);
  }
  byId("slider").value = index;
  byId("slider").setAttribute("aria-valuetext", `step ${index} of ${data.frames.length - 1}`);
  byId("counts").textContent = counts(frame);
  byId("events").textContent = picked === null ? events(frame) : details(picked);
  const text = Array.from(data.text), shown = frame.shown;
  byId("settled").textContent = text.slice(0, shown).join("");
  byId("ahead").textContent = text.slice(shown).join("");
}

function drawBlock(block, frame, windowEnd) {
  if (!data.blockSize) {
    block.state.textContent = isLast(index) ? `finished (${data.finish})` : STATES[frame.status[0]];
    return;
  }
  const place = (block.at - frame.start) / data.blockSize;
  const inside = place >= 0 && block.at < windowEnd;
  const status = place < 0 ? CACHED : STATES[inside ? frame.status[place] : 0];
  block.state.textContent = status;
  const top = inside && place === 0, bottom = inside && (block.end >= windowEnd || block === blocks[blocks.length - 1]);
  block.here.textContent = top ? "window" : "";
  block.box.className = "block";
  block.box.classList.toggle("window", inside);
  block.box.classList.toggle("top", top);
  block.box.classList.toggle("bottom", bottom);
  block.box.classList.toggle("closed", status === STATES[0]);
}

function drawCell(cell, position, held, guess, isNew, old, inside) {
  const showGuess = !held && guess && byId("guesses").checked;
  const shown = held || (showGuess ? guess : null);
  const classes = ["cell"];
  const isPrompt = position < data.promptLen;
  if (isPrompt) classes.push("prompt");
  else if (held) classes.push(held.share < 0 ? "unasked" : colour(held.share));
  else if (position >= data.limit) classes.push("past");
  else classes.push("hole");
  if (showGuess) classes.push("guess");
  if (isNew) classes.push("new");
  if (old !== undefined) classes.push("edit");
  if (shown && data.pieces[shown.token] && data.pieces[shown.token][1]) classes.push("special");
  if (held && isLast(index) && position >= data.promptLen + data.numTokens) classes.push("dropped");
  if (inside) classes.push("window");
  if (picked === position) classes.push("picked");
  cell.className = classes.join(" ");
  cell.replaceChildren(element("span", "piece", shown ? named(shown.token) : position >= data.limit && !isPrompt ? "" : "·"));
  if (isNew || old !== undefined) cell.append(element("span", "mark", isNew ? "+" : "~"));
  if (shown && shown.share >= 0 && !isPrompt) {
    const bar = element("span", "bar");
    bar.style.width = `${shown.share / 10}%`;
    cell.append(bar);
  }
  cell.title = details(position);
}

const colour = (share) => `p${EDGES.filter((edge) => share >= edge).length - 1}`;

function counts(frame) {
  const steps = data.frames.length - 1;
  const rate = frame.nfe ? (frame.settled / frame.nfe).toFixed(2) : "0.00";
  const done = isLast(index) ? `, finished (${data.finish})` : "";
  return `Step ${index} of ${steps} · ${plural(frame.nfe, "forward")} · ${plural(frame.settled, "token")} settled · ${rate} tokens per forward${done}`;
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function events(frame) {
  if (!index) return `Before the first step: ${plural(data.promptLen, "prompt token")}, of which ${frame.start} are in the cache.`;
  const told = [];
  if (frame.accepted.length) told.push(`${plural(frame.accepted.length, "hole")} filled (+)`);
  if (frame.edited.length) told.push(`${plural(frame.edited.length, "token")} written over (~): ${frame.edited.slice(0, 4).map(edit).join(", ")}${frame.edited.length > 4 ? " and others" : ""}`);
  if (frame.commit) told.push(`${plural(frame.commit, "token")} put into the cache, the window moved on`);
  return told.length ? `In this step: ${told.join("; ")}.` : "In this step nothing was filled.";
}

const edit = ([position, old]) => `${named(old)} → ${named(looks[index].get(position).token)}`;

function details(position) {
  const held = looks[index].get(position);
  const guess = data.frames[index].guesses.find(([at]) => at === position);
  const where = `position ${position}`;
  if (held && position < data.promptLen) return `${where}: ${named(held.token)} (id ${held.token}), of the prompt`;
  if (held) {
    const since = held.since ? `since step ${held.since}` : "from the beginning";
    return `${where}: ${named(held.token)} (id ${held.token}), ${percent(held.share)}, ${since}`;
  }
  if (guess) return `${where}: a hole; the model says ${named(guess[1])} (id ${guess[1]}), ${percent(guess[2])}`;
  return position >= data.limit ? `${where}: past the text's limit` : `${where}: a hole`;
}

// --- the legend ---------------------------------------------------------------------------------

function makeLegend() {
  const legend = byId("legend");
  const sample = (classes, text, share, mark) => {
    const cell = element("div", `cell ${classes}`, "");
    cell.append(element("span", "piece", text));
    if (mark) cell.append(element("span", "mark", mark));
    if (share) { const bar = element("span", "bar"); bar.style.width = `${share}%`; cell.append(bar); }
    return cell;
  };
  const add = (cell, text) => { const row = element("div"); row.append(cell, element("span", "", text)); legend.append(row); };
  EDGES.forEach((edge, i) => {
    const next = EDGES[i + 1];
    add(sample(`p${i}`, `${edge / 10}%`, (edge + (next || 1000)) / 20), next ? `${edge / 10} to ${next / 10} % sure` : "surer (the bar is the probability)");
  });
  add(sample("unasked", "a"), "filled, probability not asked");
  add(sample("hole", "·"), "hole");
  add(sample("hole guess", "a", 40), "hole, with what the model says of it");
  add(sample("p4 new", "a", 98, "+"), "filled in this step");
  add(sample("p4 edit", "a", 98, "~"), "written over in this step");
  add(sample("prompt", "a"), "prompt");
  add(sample("p4 dropped", "a"), "behind the end of the text");
  const states = [...STATES, CACHED].join(" · ");
  legend.append(element("span", "", `Blocks: ${states}. The blue frame is the window. ␣ space, ⏎ line end, ⟨E2⟩ part of a character.`));
}

// --- controls -----------------------------------------------------------------------------------

function show(next) {
  index = Math.min(Math.max(next, 0), data.frames.length - 1);
  if (isLast(index)) pause();
  draw();
  // On a small screen what happens would be out of sight.
  const board = byId("board");
  const here = board.querySelector(".cell.new, .cell.edit") || board.querySelector(".block.window");
  if (here) here.scrollIntoView({ block: "nearest" });
}

function pause() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "Play";
}

function play() {
  if (timer) return pause();
  if (isLast(index)) show(0);
  byId("play").textContent = "Pause";
  timer = setInterval(() => show(index + 1), FRAME_MS);
}

const KEYS = {
  ArrowRight: () => { pause(); show(index + 1); }, ArrowLeft: () => { pause(); show(index - 1); },
  Home: () => { pause(); show(0); }, End: () => { pause(); show(data.frames.length - 1); },
  " ": play, g: () => byId("guesses").click(), s: () => save(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  // A focused button has the space key for itself; the arrows of the slider do the same as ours.
  if (event.key === " " && /^(BUTTON|SUMMARY|INPUT)$/.test(event.target.tagName) && event.target.id !== "slider") return;
  event.preventDefault();
  KEYS[event.key]();
}

// --- a picture of what is shown -----------------------------------------------------------------

// Draws boxes, borders and text of the page where the browser has put them.
function paint(context, node, origin) {
  if (node.nodeType === Node.TEXT_NODE) return paintText(context, node, origin);
  if (node.nodeType !== Node.ELEMENT_NODE || !node.getClientRects().length) return;
  const style = getComputedStyle(node), box = node.getBoundingClientRect();
  const x = box.left - origin.left, y = box.top - origin.top;
  context.save();
  context.globalAlpha *= Number(style.opacity);
  context.fillStyle = style.backgroundColor;
  context.beginPath();
  context.roundRect(x, y, box.width, box.height, parseFloat(style.borderTopLeftRadius) || 0);
  context.fill();
  for (const [side, x0, y0, x1, y1] of [["Top", 0, 0, 1, 0], ["Right", 1, 0, 1, 1], ["Bottom", 0, 1, 1, 1], ["Left", 0, 0, 0, 1]])
    paintEdge(context, style, side, x + x0 * box.width, y + y0 * box.height, x + x1 * box.width, y + y1 * box.height);
  if (style.overflow === "hidden") { context.beginPath(); context.rect(x, y, box.width, box.height); context.clip(); }
  const closed = node.tagName === "DETAILS" && !node.open;
  for (const child of closed ? node.querySelectorAll("summary") : node.childNodes) paint(context, child, origin);
  context.restore();
}

function paintEdge(context, style, side, x0, y0, x1, y1) {
  const width = parseFloat(style[`border${side}Width`]), kind = style[`border${side}Style`];
  if (!width || kind === "none") return;
  const inward = { Top: [0, 0.5], Right: [-0.5, 0], Bottom: [0, -0.5], Left: [0.5, 0] }[side];
  const [dx, dy] = inward.map((part) => part * width);
  context.strokeStyle = style[`border${side}Color`];
  context.lineWidth = width;
  context.setLineDash(kind === "dashed" ? [5, 3] : kind === "dotted" ? [2, 2] : []);
  context.beginPath();
  context.moveTo(x0 + dx, y0 + dy);
  context.lineTo(x1 + dx, y1 + dy);
  context.stroke();
}

function paintText(context, node, origin) {
  if (!node.data.trim()) return;
  const style = getComputedStyle(node.parentElement), range = document.createRange();
  context.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textBaseline = "middle";
  context.direction = style.direction;
  context.textAlign = "left";
  let line = null;
  const flush = () => { if (line) context.fillText(line.text, line.left - origin.left, line.middle - origin.top); };
  let offset = 0;
  for (const char of graphemes(node.data)) {
    range.setStart(node, offset);
    range.setEnd(node, (offset += char.length));
    const box = range.getBoundingClientRect();
    if (!box.width && !box.height) continue;
    const middle = box.top + box.height / 2;
    if (line && Math.abs(line.middle - middle) < 3) { line.text += char; line.left = Math.min(line.left, box.left); }
    else { flush(); line = { text: char, left: box.left, middle }; }
  }
  flush();
}

const graphemes = (text) => (window.Intl && Intl.Segmenter ? Array.from(new Intl.Segmenter().segment(text), (one) => one.segment) : Array.from(text));

function save() {
  const stage = byId("stage");
  for (const change of stage.getAnimations({ subtree: true })) change.finish(); // no colours half way
  const box = stage.getBoundingClientRect();
  const scale = Math.min(2, 8000 / Math.max(box.width, box.height));
  const canvas = document.createElement("canvas");
  const margin = parseFloat(getComputedStyle(stage).paddingBottom) - 14; // room for the controls
  canvas.width = Math.round(box.width * scale);
  canvas.height = Math.round((box.height - margin) * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(0, 0, box.width, box.height);
  paint(context, stage, box);
  canvas.toBlob((blob) => {
    const link = element("a");
    link.href = URL.createObjectURL(blob);
    link.download = `step-${String(index).padStart(4, "0")}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }, "image/png");
}

function start() {
  byId("title").textContent = `How ${data.strategy} wrote this text`;
  const settings = Object.entries(data.settings).map(([name, value]) => `${name} ${value}`);
  byId("facts").textContent = [data.model, ...settings].filter(Boolean).join(" · ");
  byId("prompt").textContent = data.prompt;
  if (data.first) byId("cached").textContent = `${plural(data.first, "prompt token")} before this, in the cache from the beginning`;
  byId("slider").max = data.frames.length - 1;
  makeBoard();
  makeLegend();
  byId("slider").addEventListener("input", (event) => { pause(); show(Number(event.target.value)); });
  for (const [id, key] of [["first", "Home"], ["back", "ArrowLeft"], ["on", "ArrowRight"], ["last", "End"], ["play", " "], ["save", "s"]])
    byId(id).addEventListener("click", KEYS[key]);
  byId("guesses").addEventListener("change", draw);
  document.addEventListener("keydown", onKey);
  draw();
}

start();
