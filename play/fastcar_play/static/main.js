// The page: what the server says goes to pictures, figures and controls, and what the player does goes to the server.

import { Connection } from "./connection.js";
import { Controls } from "./controls.js";
import { Pictures, differing } from "./picture.js";

const at = (id) => document.getElementById(id);
const RETRY_MS = 10_000;
const NOTE_MS = 6_000;
const SMOOTHED_MS = 3_000; // the speed of single frames flickers
const SEEN = {
  dense: "A neural network makes every frame from your keys, and all of it is computed.",
  replay: "A neural network makes every frame from your keys, and replay skips parts of it.",
  both: "Same keys, same draws. Left: all is computed. Right: replay.",
};

const pictures = new Pictures(at("pictures"));
let hello = null;
let status = null;
let played = false; // a first key starts the game, later ones do not end a pause
let waiting = false; // the decoder reads frames, which takes a moment
let noteTimer = 0;
let speeds = []; // of the frames of SMOOTHED_MS, with the time when each came

function state(name, title, hint) {
  document.body.dataset.state = name;
  at("panel").inert = name !== "playing" && name !== "paused";
  at("state").textContent = name === "full" ? "no free place" : name;
  at("cover-title").textContent = title;
  at("cover-hint").textContent = hint;
}

function note(text) {
  clearTimeout(noteTimer);
  at("note").textContent = text;
  if (text) noteTimer = setTimeout(() => note(""), NOTE_MS);
}

function wait(text) {
  note(text);
  waiting = true;
}

function restart(seed) {
  const number = (id, least, most, otherwise) => {
    const value = at(id).valueAsNumber;
    const kept = Number.isFinite(value) ? Math.min(most, Math.max(least, value)) : otherwise;
    at(id).value = kept;
    return kept;
  };
  if (seed !== undefined) at("seed").value = seed;
  wait("The decoder reads the start.");
  connection.send("restart", {
    start: at("start").selectedIndex,
    seed: Math.round(number("seed", 0, Number.MAX_SAFE_INTEGER, 0)),
    temperature: number("temperature", 0, 10, status.temperature),
    top_k: Math.round(number("top-k", 0, hello.codes, status.top_k)),
  });
}

function run(value) {
  played ||= value;
  connection.send("run", { value });
}

const controls = new Controls(at("pad"), (held, pressed) => {
  connection.send("keys", { held });
  if (pressed && !played && status) run(true);
});

const connection = new Connection({
  hello(message) {
    hello = message;
    played = false;
    document.title = `${message.world} – fastcar play`;
    at("world").textContent = message.world;
    at("artifact").textContent = `${message.artifact}, ${message.spared.length} layers, ${message.tokens_per_frame} tokens per frame`;
    pictures.shape(message);
    controls.build(message.buttons);
    at("start").replaceChildren(...message.starts.map((name) => new Option(name.replaceAll("_", " "))));
    at("top-k").max = message.codes;
    at("threshold").max = message.levels.length - 1;
    at("limit-text").textContent = `Limit to the game's ${message.frames_per_second.toFixed(1)} frames / s`;
    for (const input of document.querySelectorAll("[name=mode]")) input.disabled = message.gate === null && input.value !== "dense";
    at("record-card").hidden = message.record_frames === null && !message.saves;
    at("together").parentElement.hidden = !message.saves;
    at("together").checked = false;
    const draft = 1 - mean(message.spared);
    at("stand-in").textContent = `${draft ? `a draft with ${percent(draft)} of its weights, and ` : ""}its output of the frame before`;
    at("how-replay").hidden = message.gate === null;
    at("no-replay").hidden = message.gate !== null;
    at("replay-settings").hidden = message.gate === null;
    connection.send("visible", { value: !document.hidden });
  },

  status(message) {
    if (message.mode !== status?.mode || message.threshold !== status.threshold) speeds = [];
    status = message;
    if (message.running) state("playing", "", "");
    else state("paused", played ? "Paused" : "Play", played ? "Press here to go on." : "Press here or any key of the game. Every frame is generated from your keys.");
    at("run").textContent = message.running ? "Pause" : "Play";
    for (const input of document.querySelectorAll("[name=mode]")) input.checked = input.value === message.mode;
    at("replay-settings").classList.toggle("off", message.mode === "dense");
    at("start").selectedIndex = message.start;
    at("limit").checked = message.limited;
    at("device").hidden = message.device === undefined; // a server has its own
    at("device").textContent = message.device?.toUpperCase() ?? "";
    at("device").title = message.notice ?? "What decodes in this browser";
    for (const [id, value] of [["seed", message.seed], ["temperature", message.temperature], ["top-k", message.top_k]]) {
      if (document.activeElement !== at(id)) at(id).value = value;
    }
    at("seen-text").textContent = SEEN[message.mode];
    showThreshold(message.threshold);
    showRecorded(message.recorded);
    showLegend();
    if (message.note || waiting) note(message.note);
    waiting = false;
  },

  frame(message, body) {
    pictures.show(message, body, () => {
      document.body.dataset.frame = message.number;
      connection.send("drawn", { serial: message.serial });
    });
    showFigures(message);
    showDiffering(message.sides);
    showRecorded(message.recorded);
    const shown = at("note").textContent; // an answer stays
    if (message.refilled && !shown) note("The decoder's context was full: it has read the last frames again.");
  },

  recording(message, body) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([body], { type: message.kind ?? "image/gif" }));
    link.download = message.name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), NOTE_MS);
    note(`${message.frames} frames were saved as ${message.name}.`);
  },

  full(message) {
    const places = message.visitors === 1 ? "The only place is" : `All ${message.visitors} places are`;
    state("full", `${places} taken`, "Press here to try again. The page also tries by itself.");
    setTimeout(again, RETRY_MS);
  },

  ended(message) {
    status = null;
    state("ended", "The game has ended", `${message.reason} Press here for a new one.`);
  },
});

function again() {
  if (document.body.dataset.state === "full" || document.body.dataset.state === "ended") {
    state("connecting", "Connecting", "");
    connection.open();
  }
}

function showThreshold(threshold) {
  const [compiled, slider] = [threshold === "compiled", at("threshold")];
  slider.classList.toggle("unset", compiled); // no handle: the layers have thresholds of their own
  at("compiled").setAttribute("aria-pressed", compiled);
  if (!compiled && document.activeElement !== slider) slider.value = hello.levels.indexOf(threshold);
  const text = compiled ? "as compiled, layer by layer" : threshold === null ? "never" : String(Number(threshold.toPrecision(4)));
  at("threshold-text").textContent = text;
  slider.setAttribute("aria-valuetext", text);
}

function showRecorded(count) {
  if (hello.saves) {
    at("record").textContent = "Save the game";
    at("recorded").textContent = "a small file that plays it again, bit for bit";
    return;
  }
  at("record").setAttribute("aria-pressed", count !== null);
  at("record").textContent = count === null ? "Record a GIF" : "Stop and save";
  at("recorded").textContent = count === null ? `${hello.record_frames} frames at most` : `${count} of ${hello.record_frames} frames`;
}

function showLegend() {
  const shown = at("heat").checked && status !== null && status.mode !== "dense";
  at("legend").hidden = !shown;
  at("pictures").classList.toggle("no-heat", !at("heat").checked);
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const percent = (share) => `${Math.round(100 * share)} %`;

function showFigures(frame) {
  const generated = frame.sides.filter((side) => side.token_ms !== null);
  if (!generated.length) return;
  const [last, compared] = [generated.at(-1), generated.length > 1];
  const speed = smoothed(compared ? generated[0].token_ms / last.token_ms : last.token_ms);
  at("speed-title").textContent = compared ? "replay is" : "ms / token";
  figure("token-ms", [last], () => (compared ? `${speed.toFixed(1)}x as fast` : speed.toFixed(2)));
  figure("share", [last], (side) => percent(mean(side.by_layer)));
  figure("spared", [last], (side) => percent(mean(side.by_layer.map((share, layer) => share * hello.spared[layer]))));
  if (frame.fps !== null) at("fps").textContent = frame.fps.toFixed(1);
  at("accepted").textContent = last.accepted > 1 ? `${last.accepted.toFixed(1)} tokens a step` : "";
  const steps = generated.reduce((sum, side) => sum + side.token_ms * hello.tokens_per_frame, 0);
  const draws = generated.reduce((sum, side) => sum + side.sampling_ms, 0);
  const parts = [["steps", steps], ["draws", draws], ["pixels", frame.pixels_ms], ["PNG", frame.png_ms]].filter(([, ms]) => ms > 0);
  const times = parts.map(([name, value]) => `${name} ${value.toFixed(1)} ms`).join(", ");
  const tokens = generated.map((side) => `${side.side} ${side.token_ms.toFixed(2)}`).join(", ");
  at("parts").textContent = `Frame ${frame.number}, ${frame.action}: ${times}; ${tokens} ms / token.`;
}

/** The median of what this was given in the last SMOOTHED_MS. */
function smoothed(value) {
  const now = performance.now();
  speeds = [...speeds.filter(({ came }) => now - came < SMOOTHED_MS), { came: now, value }];
  const sorted = speeds.map((speed) => speed.value).sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

function showDiffering(sides) {
  at("differs").hidden = sides.length < 2;
  at("differing").textContent = `${differing(sides).length} of ${sides[0].codes.length} tiles differ.`;
}

/** text: of a side of the frame. */
function figure(id, sides, text) {
  at(id).replaceChildren(...sides.map((side) => {
    const span = document.createElement("span");
    span.className = `side-${side.side}`;
    span.textContent = text(side);
    return span;
  }));
}

at("cover").addEventListener("click", () => (status === null ? again() : run(true)));
at("run").addEventListener("click", () => status && run(!status.running));
at("restart").addEventListener("click", () => status && restart());
at("random").addEventListener("click", () => status && restart(Math.floor(Math.random() * 1e6)));
at("start").addEventListener("change", () => status && restart());
at("record").addEventListener("click", () => connection.send("record", { value: status?.recorded === null }));
at("compiled").addEventListener("click", () => connection.send("threshold", { value: "compiled" }));
at("heat").addEventListener("change", showLegend);
at("limit").addEventListener("change", () => connection.send("limit", { value: at("limit").checked }));
at("together").addEventListener("change", () => {
  const { checked } = at("together");
  document.querySelector("[name=mode][value=both]").disabled = checked || hello.gate === null;
  connection.send("together", { value: checked });
});
at("threshold").addEventListener("input", () => {
  connection.send("threshold", { value: hello.levels[at("threshold").valueAsNumber] });
});
for (const input of document.querySelectorAll("[name=mode]")) {
  input.addEventListener("change", () => {
    connection.send("mode", { value: input.value });
    if (input.value === "both") wait("Both decoders read the last frames.");
  });
}
document.addEventListener("visibilitychange", () => {
  connection.send("visible", { value: !document.hidden });
  controls.release();
});
// After a click the keys are the game's again; whoever goes by Tab keeps the focus.
for (const kind of ["pointerup", "click"]) {
  document.addEventListener(kind, (event) => {
    const focused = document.activeElement;
    if ((kind === "pointerup" || event.detail > 0) && focused.matches("button, input:not([type=number])")) focused.blur();
  });
}
at("start").addEventListener("change", () => at("start").blur());
window.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input[type=number], select");
  if (event.code === "KeyP" && !typing && !event.repeat && status && !controls.keys.has("KeyP")) run(!status.running);
});
