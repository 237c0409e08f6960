"use strict";
// Replays the frames of one text, or of several side by side. What the model wrote enters the page
// as text only.
const runs = [].concat(JSON.parse(document.getElementById("data").textContent));
const byId = (id) => document.getElementById(id);
const STATES = ["not open", "active", "to cache"], CACHED = "cached";
const FRAME_MS = 650, HOLE = -1;
// Lower edges of the five colours, in thousandths.
const EDGES = [0, 500, 700, 900, 970];
const MARKS = { filled: "+", changed: "~" };
const SPACES = { "␣": " ", "⏎": "\n", "␍": "\r", "⇥": "\t" };
const HINT = "Click a cell, or reach the cells with Tab, to read its details here.";
const lastStep = Math.max(...runs.map((run) => run.frames.length)) - 1;
const panels = [];
let step = 0, picked = null, timer = null; // picked: the panel and position whose details are shown

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const percent = (share) => (share < 0 ? "probability not asked" : `probability ${(share / 10).toFixed(1)} %`);
const colour = (share) => `p${EDGES.filter((edge) => share >= edge).length - 1}`;
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

// Pieces as text again: signs become spaces, bytes become characters.
function plain(pieces) {
  const text = pieces.replace(/[␣⏎␍⇥]/g, (sign) => SPACES[sign]);
  return text.replace(/(⟨[0-9A-F]{2}( [0-9A-F]{2})*⟩)+/g, (run) =>
    new TextDecoder().decode(Uint8Array.from(run.match(/[0-9A-F]{2}/g), (code) => parseInt(code, 16))));
}

// --- one text: its blocks, cells and figures ----------------------------------------------------

class Panel {
  constructor(data, box) {
    this.data = data;
    this.part = (name) => box.querySelector(`.${name}`);
    this.cells = new Map(); // position -> element
    this.blocks = [];
    this.looks = []; // of each frame: position -> {token, share, since}
    for (const [i, frame] of data.frames.entries()) {
      const look = new Map(i ? this.looks[i - 1] : []);
      for (const [position, token, share] of frame.put) {
        const old = look.get(position);
        const since = old && old.token === token ? old.since : i;
        if (token === HOLE) look.delete(position);
        else look.set(position, { token, share, since });
      }
      this.looks.push(look);
    }
    this.last = data.frames.length - 1;
    // The token that ended the text stands right behind it.
    this.end = data.finish === "stop" ? this.looks[this.last].get(data.promptLen + data.numTokens) : undefined;
    this.endPosition = this.end ? data.promptLen + data.numTokens : -1;
    this.cursor = data.first; // the one cell that Tab reaches
    this.part("name").textContent = data.strategy;
    this.part("facts").textContent = settings(data);
    if (data.first) this.part("cached").textContent = `${plural(data.first, "prompt token")} before this, in the cache from the beginning`;
    this.makeBoard();
  }

  makeBoard() {
    const { data } = this, board = this.part("board");
    const size = data.blockSize || data.end - data.first;
    board.classList.toggle("flow", !data.blockSize);
    board.setAttribute("aria-label", `Cells of ${data.strategy}; the arrow keys move between them`);
    for (let at = data.first; at < data.end; at += size) {
      const block = { at, end: Math.min(at + size, data.end), box: element("div", "block") };
      block.name = data.blockSize ? `block ${(at - data.first) / size + 1}` : "cells";
      block.state = element("span", "status");
      block.here = element("span", "here");
      const head = element("div", "head");
      head.setAttribute("aria-hidden", "true"); // the group has the same as its label
      head.append(element("span", "", block.name), block.state, element("span", "where", `positions ${at} to ${block.end - 1}`), block.here);
      const grid = element("div", "cells");
      for (let position = at; position < block.end; position++) grid.append(this.makeCell(position));
      block.box.setAttribute("role", "group");
      block.box.append(head, grid);
      board.append(block.box);
      this.blocks.push(block);
    }
    board.addEventListener("keydown", (event) => this.onKey(event));
  }

  makeCell(position) {
    const cell = element("div", "cell");
    cell.dir = "auto";
    cell.tabIndex = -1;
    cell.setAttribute("role", "option");
    cell.addEventListener("focus", () => this.pick(position));
    this.cells.set(position, cell);
    return cell;
  }

  // --- one frame --------------------------------------------------------------------------------

  get at() { return Math.min(step, this.last); }
  get frame() { return this.data.frames[this.at]; }
  get look() { return this.looks[this.at]; }

  named(token) {
    const { data } = this;
    return data.pieces[token] ? data.pieces[token][0] : `[${token}]`;
  }

  isSpecial(token) {
    const { data } = this;
    return Boolean(data.pieces[token] && data.pieces[token][1]);
  }

  draw() {
    const { data, frame, look } = this, focused = document.activeElement === this.cells.get(this.cursor);
    // Behind its last frame a text stands still while another goes on.
    this.isOver = step > this.last;
    this.accepted = new Set(this.isOver ? [] : frame.accepted);
    this.edited = new Map(this.isOver ? [] : frame.edited);
    this.guesses = new Map(frame.guesses.map(([position, token, share]) => [position, { token, share }]));
    const windowEnd = frame.start + data.windowSize;
    for (const block of this.blocks) this.drawBlock(block, windowEnd);
    for (const [position, cell] of this.cells) this.drawCell(cell, position, position >= frame.start && position < windowEnd);
    this.rove(focused);
    this.part("counts").textContent = this.counts();
    this.part("events").textContent = this.events();
    this.drawText(look);
  }

  drawBlock(block, windowEnd) {
    const { data, frame, look } = this;
    let status = this.at === this.last ? "finished" : STATES[frame.status[0]], isFirst = true;
    if (data.blockSize) {
      const place = (block.at - frame.start) / data.blockSize;
      const inside = place >= 0 && block.at < windowEnd;
      status = place < 0 ? CACHED : STATES[inside ? frame.status[place] : 0];
      isFirst = inside && place === 0;
      const bottom = inside && (block.end >= windowEnd || block === this.blocks[this.blocks.length - 1]);
      block.here.textContent = isFirst ? "window" : "";
      block.box.className = "block";
      block.box.classList.toggle("window", inside);
      block.box.classList.toggle("top", isFirst);
      block.box.classList.toggle("bottom", bottom);
    }
    let isEmpty = true;
    for (let position = block.at; position < block.end && isEmpty; position++) isEmpty = !look.has(position);
    block.isClosed = status === STATES[0] && isEmpty && !isFirst;
    block.box.classList.toggle("closed", block.isClosed);
    block.box.setAttribute("aria-label", `${block.name}, ${status}`);
    block.state.textContent = status;
    block.state.dataset.status = status;
  }

  drawCell(cell, position, inside) {
    const { data } = this, held = this.look.get(position), guess = this.guesses.get(position), old = this.edited.get(position);
    const showGuess = !held && guess && byId("guesses").checked;
    const shown = held || (showGuess ? guess : null), isNew = this.accepted.has(position);
    const isPrompt = position < data.promptLen, isDropped = held && this.isDropped(position);
    const classes = ["cell"];
    if (isPrompt) classes.push("prompt");
    else if (isDropped) classes.push("dropped");
    else if (held) classes.push(held.share < 0 ? "unasked" : colour(held.share));
    else if (position >= data.limit) classes.push("past");
    else classes.push("hole");
    if (showGuess) classes.push("guess");
    if (isNew) classes.push("new");
    if (old !== undefined) classes.push("edit");
    if (shown && this.isSpecial(shown.token)) classes.push("special");
    if (this.isEnd(position)) classes.push("end");
    if (inside) classes.push("window");
    const isPicked = picked !== null && picked.panel === this && picked.position === position;
    if (isPicked) classes.push("picked");
    cell.className = classes.join(" ");
    cell.replaceChildren(element("span", "piece", shown ? this.named(shown.token) : ""));
    if (old !== undefined) cell.prepend(element("span", "was", this.named(old)));
    if (isNew || old !== undefined) cell.append(element("span", "mark", isNew ? MARKS.filled : MARKS.changed));
    if (shown && shown.share >= 0 && !isPrompt && !isDropped) {
      const bar = element("span", "bar");
      bar.style.width = `${shown.share / 10}%`;
      cell.append(bar);
    }
    const told = this.details(position);
    cell.title = told;
    cell.setAttribute("aria-label", held ? this.named(held.token) : "hole"); // the rest is told as details
    cell.setAttribute("aria-selected", String(isPicked));
  }

  isEnd(position) { return this.at === this.last && position === this.endPosition; }

  isDropped(position) {
    const { data } = this;
    return this.at === this.last && position >= data.promptLen + data.numTokens && !this.isEnd(position);
  }

  // Settled text, then what stands in cells that may still change, with a box where holes are.
  drawText(look) {
    const { data, frame } = this, ahead = this.part("ahead"), end = this.part("end-token");
    this.part("settled").textContent = Array.from(data.text).slice(0, frame.shown).join("");
    end.hidden = this.at !== this.last || !this.end;
    end.textContent = this.end ? this.named(this.end.token) : "";
    end.title = "the end token: the text ends before it";
    ahead.replaceChildren();
    if (this.at === this.last) return;
    const from = data.promptLen + frame.settled;
    const filled = [...look.keys()].filter((position) => position >= from && position < data.limit);
    let pieces = "", holes = 0;
    const flush = () => { if (pieces) ahead.append(plain(pieces)); pieces = ""; };
    for (let position = from; position <= Math.max(...filled); position++) {
      const held = look.get(position);
      if (held && this.isSpecial(held.token)) continue;
      if (held && holes) { flush(); ahead.append(gap(holes)); holes = 0; }
      if (held) pieces += this.named(held.token);
      else holes += 1;
    }
    flush();
  }

  // The height of the whole text, so that the blocks below it stand still while it grows.
  reserve() {
    const { data } = this, text = this.part("text"), settled = this.part("settled");
    const now = settled.textContent;
    text.style.minHeight = "";
    settled.textContent = `${data.text} ${this.end ? this.named(this.end.token) : ""}`;
    text.style.minHeight = `${Math.ceil(text.getBoundingClientRect().height)}px`;
    settled.textContent = now;
  }

  counts() {
    const { frame } = this;
    const rate = frame.nfe ? (frame.settled / frame.nfe).toFixed(2) : "0.00";
    return `Step ${this.at} of ${this.last} · ${plural(frame.nfe, "forward")} · ${plural(frame.settled, "token")} settled · ${rate} tokens per forward`;
  }

  events() {
    const { data, frame } = this;
    if (!step) return `Before the first step: ${plural(data.promptLen, "prompt token")}, ${frame.start} of them in the cache.`;
    const finished = this.end ? `the end token ${this.named(this.end.token)} follows the text` : `reason: ${data.finish}`;
    if (this.isOver) return `Finished after step ${this.last}: ${finished}.`;
    const told = [];
    if (frame.accepted.length) told.push(`${plural(frame.accepted.length, "hole")} filled (${MARKS.filled})`);
    if (frame.edited.length) {
      const shown = frame.edited.slice(0, 4).map(([position, old]) => `${this.named(old)} → ${this.named(this.look.get(position).token)}`);
      told.push(`${plural(frame.edited.length, "token")} replaced (${MARKS.changed}): ${shown.join(", ")}${frame.edited.length > 4 ? " and others" : ""}`);
    }
    if (frame.commit) told.push(`${plural(frame.commit, "token")} entered the cache, so the window moved on`);
    if (this.at === this.last) told.push(`finished, ${finished}`);
    return told.length ? `In this step: ${told.join("; ")}.` : "In this step no hole was filled.";
  }

  details(position) {
    const { data } = this, held = this.look.get(position), guess = this.guesses.get(position), old = this.edited.get(position);
    const where = `position ${position}`;
    if (held && position < data.promptLen) return `${this.named(held.token)}, prompt token (id ${held.token}), ${where}`;
    if (held) {
      const since = held.since ? `since step ${held.since}` : "from the beginning";
      const was = old === undefined ? "" : `, replaced ${this.named(old)}`;
      const role = this.isEnd(position) ? ", the end token" : this.isDropped(position) ? ", behind the end of the text" : "";
      return `${this.named(held.token)} (id ${held.token})${role}, ${percent(held.share)}, ${since}${was}, ${where}`;
    }
    if (guess) return `hole; the model proposes ${this.named(guess.token)} (id ${guess.token}), ${percent(guess.share)}, ${where}`;
    return position >= data.limit ? `past the limit of the text, ${where}` : `hole, ${where}`;
  }

  // --- the keyboard in the cells ----------------------------------------------------------------

  visible() {
    const open = this.blocks.filter((block) => !block.isClosed);
    return open.flatMap(({ at, end }) => Array.from({ length: end - at }, (_, i) => at + i));
  }

  // Keeps one visible cell in the order of Tab, and the focus on it where it was.
  rove(focused) {
    const visible = this.visible();
    if (!visible.includes(this.cursor)) this.cursor = visible.reduce((best, one) => (Math.abs(one - this.cursor) < Math.abs(best - this.cursor) ? one : best));
    for (const [position, cell] of this.cells) cell.tabIndex = position === this.cursor ? 0 : -1;
    if (focused) this.cells.get(this.cursor).focus({ preventScroll: true });
  }

  pick(position) {
    this.cursor = position;
    if (picked && picked.panel === this && picked.position === position) return;
    picked = { panel: this, position };
    draw();
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const visible = this.visible(), index = visible.indexOf(this.cursor);
    let next;
    if (event.key === "ArrowRight") next = visible[index + 1];
    else if (event.key === "ArrowLeft") next = visible[index - 1];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") next = this.beside(visible, event.key === "ArrowDown");
    else if (event.key === "Home") next = visible[0];
    else if (event.key === "End") next = visible[visible.length - 1];
    else return;
    event.preventDefault();
    event.stopPropagation();
    if (next !== undefined) this.cells.get(next).focus();
  }

  // The cell of the next or previous row that is nearest below or above.
  beside(visible, isDown) {
    const box = (position) => this.cells.get(position).getBoundingClientRect(), here = box(this.cursor);
    const distance = (position) => {
      const { left, top } = box(position);
      return Math.abs(top - here.top) * 1000 + Math.abs(left - here.left);
    };
    const ahead = visible.filter((position) => (isDown ? box(position).top > here.top + 2 : box(position).top < here.top - 2));
    return ahead.sort((a, b) => distance(a) - distance(b))[0];
  }
}

function gap(holes) {
  const box = element("span", "gap");
  box.title = plural(holes, "hole");
  box.style.width = `${Math.min(holes, 8) * 0.55}em`;
  return box;
}

const settings = (data) => Object.entries(data.settings).map(([name, value]) => `${name} ${value ?? "none"}`).join(" · ");

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
  const add = (text, ...cells) => {
    const row = element("div"), name = element("span", "", text);
    row.append(...cells, name);
    legend.append(row);
    return row;
  };
  const scale = EDGES.map((edge, i) => {
    const next = EDGES[i + 1] || 1000;
    return sample(`p${i}`, `${edge / 10}–${next / 10}`, (edge + next) / 20);
  });
  add("colour and bar: how sure the model is, in %", ...scale).className = "scale";
  add("hole, with the model's proposal", sample("hole guess", "a", 40));
  add("filled in this step", sample("p4 new", "a", 98, MARKS.filled));
  const changed = sample("p4 edit", "a", 98, MARKS.changed);
  changed.prepend(element("span", "was", "b"));
  add("replaced in this step: a for b", changed);
  add("filled, model not asked", sample("unasked", "a"));
  add("prompt", sample("prompt", "a"));
  add("end token: the text ends before it", sample("p4 end", "end"));
  add("discarded, behind the end", sample("dropped", "a"));
  const text = element("span", "", "text so far: upright is settled, ");
  text.append(element("span", "ahead", "grey and slanted"), " may still change, ", gap(3), " holes");
  legend.append(text);
  const path = element("div", "path");
  for (const status of [...STATES, CACHED]) {
    const pill = element("span", "status", status);
    pill.dataset.status = status;
    path.append(pill);
  }
  path.append(element("span", "", "a block passes through these states in this order; cached tokens never change"));
  legend.append(path);
  legend.append(element("span", "signs", "␣ space, ⏎ line end, ⟨E2⟩ part of a character"));
  legend.append(element("span", "signs", "Keys: ← and → step, space plays; in the cells the arrows move, n and p step"));
}

// --- controls -----------------------------------------------------------------------------------

function draw() {
  for (const panel of panels) panel.draw();
  byId("slider").value = step;
  byId("slider").setAttribute("aria-valuetext", `step ${step} of ${lastStep}`);
  byId("details").textContent = picked === null ? HINT : (panels.length > 1 ? `${picked.panel.data.strategy}: ` : "") + picked.panel.details(picked.position);
}

const reserve = () => { for (const panel of panels) panel.reserve(); };

function show(next) {
  step = Math.min(Math.max(next, 0), lastStep);
  if (step === lastStep) pause();
  draw();
  writeAddress();
  follow();
}

// On a small screen what happens would be out of sight.
function follow() {
  const boards = Array.from(document.querySelectorAll(".board"));
  if (boards.length > 1 || boards[0].contains(document.activeElement)) return;
  const here = boards[0].querySelector(".cell.new, .cell.edit") || boards[0].querySelector(".block.window");
  if (here) here.scrollIntoView({ block: "nearest" });
}

// #step=4 opens the page at step 4.
function writeAddress() {
  try {
    history.replaceState(null, "", `#step=${step}`);
  } catch {
    // A browser may refuse, where the page has no address or after very many steps.
  }
}

function readAddress() {
  const found = /^#step=(\d+)$/.exec(location.hash);
  if (found) step = Math.min(Number(found[1]), lastStep);
  pause();
  draw();
}

const setLive = (value) => { for (const state of document.querySelectorAll(".state")) state.setAttribute("aria-live", value); };

function pause() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "Play";
  setLive("polite");
}

function play() {
  if (timer) return pause();
  if (step === lastStep) show(0);
  byId("play").textContent = "Pause";
  setLive("off"); // steps come faster than they can be read out
  timer = setInterval(() => show(step + 1), FRAME_MS);
}

const on = () => { pause(); show(step + 1); }, back = () => { pause(); show(step - 1); };
const KEYS = {
  ArrowRight: on, n: on, ArrowLeft: back, p: back,
  Home: () => { pause(); show(0); }, End: () => { pause(); show(lastStep); },
  Escape: () => { picked = null; draw(); },
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
  const width = parseFloat(style.borderTopWidth), radius = parseFloat(style.borderTopLeftRadius);
  if (radius && width && style.borderTopWidth === style.borderBottomWidth && style.borderStyle === "solid") {
    context.strokeStyle = style.borderTopColor;
    context.lineWidth = width;
    context.beginPath();
    context.roundRect(x + width / 2, y + width / 2, box.width - width, box.height - width, radius);
    context.stroke();
  } else for (const [side, x0, y0, x1, y1] of [["Top", 0, 0, 1, 0], ["Right", 1, 0, 1, 1], ["Bottom", 0, 1, 1, 1], ["Left", 0, 0, 0, 1]])
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
  const isStruck = style.textDecorationLine === "line-through";
  const flush = () => {
    if (!line) return;
    const left = line.left - origin.left, middle = line.middle - origin.top;
    context.fillText(line.text, left, middle);
    if (isStruck) context.fillRect(left, middle, context.measureText(line.text).width, 1);
  };
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
    link.download = `step-${String(step).padStart(4, "0")}.png`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }, "image/png");
}

function start() {
  const [data] = runs, isSeveral = runs.length > 1, first = document.querySelector(".panel");
  byId("title").textContent = isSeveral ? `How ${runs.length} strategies wrote a text for the same prompt` : `How ${data.strategy} wrote this text`;
  byId("facts").textContent = [data.model, isSeveral ? "" : settings(data)].filter(Boolean).join(" · ");
  byId("prompt").textContent = data.prompt;
  byId("slider").max = lastStep;
  byId("panels").classList.toggle("several", isSeveral);
  const boxes = runs.map((_, i) => (i ? byId("panels").appendChild(first.cloneNode(true)) : first));
  for (const [i, box] of boxes.entries()) {
    for (const part of i ? box.querySelectorAll("[id]") : []) part.id += `-${i + 1}`;
    for (const part of isSeveral ? box.querySelectorAll(".name, .facts") : []) part.hidden = false;
    panels.push(new Panel(runs[i], box));
  }
  makeLegend();
  byId("slider").addEventListener("input", (event) => { pause(); show(Number(event.target.value)); });
  for (const [id, key] of [["first", "Home"], ["back", "ArrowLeft"], ["on", "ArrowRight"], ["last", "End"], ["play", " "], ["save", "s"]])
    byId(id).addEventListener("click", KEYS[key]);
  byId("guesses").addEventListener("change", draw);
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", readAddress);
  window.addEventListener("resize", reserve);
  readAddress();
  reserve();
}

start();
