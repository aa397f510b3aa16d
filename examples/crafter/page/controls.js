// The player's buttons: keys of the keyboard, and buttons on the screen for fingers.

const PLACES = {
  strafe_left: [1, 1], forward: [1, 2], strafe_right: [1, 3],
  left: [2, 1], back: [2, 2], right: [2, 3],
};
const TURNS = { forward: 0, right: 90, back: 180, left: 270 };
const KEY_NAMES = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", Space: "Space" };

export class Controls {
  /** changed: called with the names of the held buttons, and whether one was pressed just now. */
  constructor(pad, changed) {
    [this.pad, this.changed] = [pad, changed];
    this.holders = new Map(); // what holds a button: a key, or a finger -> the button's name
    window.addEventListener("keydown", (event) => this.key(event, true));
    window.addEventListener("keyup", (event) => this.key(event, false));
    window.addEventListener("blur", () => this.release());
  }

  build(buttons) {
    this.keys = new Map(buttons.flatMap(({ name, keys }) => keys.map((key) => [key, name])));
    this.buttons = new Map(buttons.map((button) => [button.name, this.made(button)]));
    const more = document.createElement("div");
    more.className = "more";
    const [main, ...others] = buttons.filter(({ name }) => !(name in PLACES)).map(({ name }) => this.buttons.get(name));
    if (main) main.className = "other";
    more.append(...others);
    this.pad.replaceChildren(...[...this.buttons.values()].filter((button) => !others.includes(button)), more);
  }

  made({ name, keys }) {
    const button = document.createElement("button");
    button.type = "button";
    button.tabIndex = -1; // the keyboard has keys of its own for it
    const words = name.replaceAll("_", " ");
    button.setAttribute("aria-label", `${words} (${keys.map(keyName).join(" or ")})`);
    button.append(name in TURNS ? arrow(TURNS[name]) : document.createTextNode(words));
    const small = document.createElement("small");
    small.textContent = keys.map(keyName).join(" ");
    button.append(small);
    if (name in PLACES) [button.style.gridRow, button.style.gridColumn] = PLACES[name].map(String);
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      button.setPointerCapture(event.pointerId);
      this.hold(`pointer ${event.pointerId}`, name);
    });
    for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) {
      button.addEventListener(kind, (event) => this.hold(`pointer ${event.pointerId}`, null));
    }
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    return button;
  }

  key(event, down) {
    const name = this.keys?.get(event.code);
    if (name === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    if (down && isFor(event.target, event.code)) return;
    event.preventDefault();
    if (!event.repeat) this.hold(event.code, down ? name : null);
  }

  hold(holder, name) {
    if ((this.holders.get(holder) ?? null) === name) return;
    if (name === null) this.holders.delete(holder);
    else this.holders.set(holder, name);
    this.tell(name !== null);
  }

  release() {
    if (!this.holders.size) return;
    this.holders.clear();
    this.tell(false);
  }

  tell(pressed) {
    const held = [...new Set(this.holders.values())];
    for (const [name, button] of this.buttons) button.classList.toggle("held", held.includes(name));
    this.changed(held, pressed);
  }
}

/** Whether a key belongs to the control that has the focus. */
function isFor(target, code) {
  if (target.matches("select, input[type=number]")) return true;
  if (target.matches("input[type=range], input[type=radio]")) return code.startsWith("Arrow");
  return target.matches("button, input") && code === "Space";
}

function keyName(code) {
  return KEY_NAMES[code] ?? code.replace(/^(Key|Digit)/, "");
}

function arrow(degrees) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 20 20");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", "M10 3 L17 12 H12.4 V17 H7.6 V12 H3 Z");
  path.setAttribute("transform", `rotate(${degrees} 10 10)`);
  svg.append(path);
  return svg;
}
