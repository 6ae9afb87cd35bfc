// The flame graph of the memory at the peak. A call is as wide as the memory that it holds, and the
// calls that it makes are below it. A click on a call shows it in full width.

const LEGIBLE = 0.03; // of the width. Narrower calls have no text.

class Flame {
  constructor(parent, tree) {
    this.tree = tree;
    this.told = make(parent, "output");
    this.graph = make(parent, "div", { className: "calls" });
    this.show([tree]);
    parent.hidden = false;
  }

  // `path` leads from the whole to the call that has the full width.
  show(path) {
    const shown = path[path.length - 1];
    this.graph.replaceChildren();
    path.slice(0, -1).forEach((call, depth) => {
      this._button(this.graph, call, 1, () => this.show(path.slice(0, depth + 1)));
    });
    this._draw(this.graph, path, 1, shown.bytes || 1);
    this.tell(shown);
  }

  _draw(parent, path, share, whole) {
    const call = path[path.length - 1];
    const again = share === 1 && path.length > 1 ? path.slice(0, -1) : path;
    this._button(parent, call, share, () => this.show(again));
    if (!call.calls.length) return;
    const row = make(parent, "div", { className: "row" });
    for (const inner of call.calls) {
      const part = make(row, "div", { className: "part" });
      part.style.width = `${(100 * inner.bytes) / (call.bytes || 1)}%`;
      this._draw(part, [...path, inner], inner.bytes / whole, whole);
    }
  }

  _button(parent, call, share, does) {
    const button = make(parent, "button", {
      type: "button",
      className: call.yours ? "yours" : "",
      title: this._described(call),
      onclick: does,
    });
    button.setAttribute("aria-label", this._described(call));
    if (share >= LEGIBLE) button.textContent = call.name;
    else button.tabIndex = -1; // reached after a click on the call above it
    button.addEventListener("focus", () => this.tell(call));
    button.addEventListener("pointerenter", () => this.tell(call));
  }

  tell(call) {
    this.told.textContent = this._described(call);
  }

  _described(call) {
    const share = (100 * call.bytes) / (this.tree.bytes || 1);
    return `${call.name}: ${byteText(call.bytes)}, ${short(share)}% of the peak`;
  }
}
