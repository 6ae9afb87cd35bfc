// The search of an explorer. It answers as one types, and says how many places match.

class Search {
  constructor(explorer, bar) {
    this.explorer = explorer;
    this.found = [];
    this.at = 0;
    this.titles = new Map(); // of each lane, in lower case
    const label = { "aria-label": "Find a kernel, a block or a line" };
    this.box = make(bar, "input", { type: "search", placeholder: "kernel or line" }, label);
    this.answer = make(bar, "output", { className: "found" });
    this.box.addEventListener("input", () => this.find(this.box.value));
    this.box.addEventListener("keydown", event => {
      if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
    });
  }

  // Chooses the first place whose name or line has the text.
  find(text) {
    const wanted = text.trim().toLowerCase();
    this.found = wanted ? this._matching(wanted) : [];
    this.at = 0;
    this.zoomed = false;
    if (this.found.length) this._choose();
    this._tell(wanted && !this.found.length ? `Nothing matches “${text.trim()}”.` : "");
  }

  // Zooms to the first match, and then goes on to the next one. After the last comes the first.
  next(by) {
    const count = this.found.length;
    if (!count) return;
    if (this.zoomed) this.at = (this.at + by + count) % count;
    this.zoomed = true;
    this._choose();
    this.explorer.zoomToChosen();
    this._tell();
  }

  _choose() {
    const { lane, index } = this.found[this.at];
    this.explorer.choose(lane, index);
  }

  _tell(instead = "") {
    const count = this.found.length;
    const place = count ? `${this.at + 1} of ${count}. Enter zooms to it, then to the next.` : "";
    this.answer.textContent = instead || place;
  }

  _matching(wanted) {
    const { data, lanes } = this.explorer,
      found = [],
      launches = [];
    const lines = new Set();
    data.lines.forEach(([location, , source], number) => {
      if (`${location}  ${source}`.toLowerCase().includes(wanted)) lines.add(number);
    });
    for (const lane of lanes) {
      if (lane instanceof Memory) continue;
      const titles = this._titles(lane);
      for (let index = 0; index < lane.count; index++) {
        const line = data.users[lane.stack[index]];
        if (!lines.has(line) && !titles[index].includes(wanted)) continue;
        const isLaunch = lane instanceof Spans && data.looks[lane.look[index]].name === "launch";
        (isLaunch ? launches : found).push({ lane, index });
      }
    }
    return [...found, ...launches]; // a kernel before the launch of the same name
  }

  _titles(lane) {
    if (!this.titles.has(lane)) {
      const titles = Array.from({ length: lane.count }, (_, index) => lane.title(index));
      this.titles.set(
        lane,
        titles.map(title => title.toLowerCase()),
      );
    }
    return this.titles.get(lane);
  }
}
