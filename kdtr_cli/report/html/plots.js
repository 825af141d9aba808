/* The pictures of one sequence over its steps: strip, heat map, curves, and the table of all their numbers. */

const GUTTER = 58, RIGHT = 10;
/* The pictures of one sequence share their axis of steps, the chosen step and its read-out. */
class Plots {
  constructor(host, source, what) {
    this.steps = source.steps; this.per = source.per; this.what = what; this.source = source;
    this.places = Math.ceil(this.steps / this.per);
    this.curves = {};
    for (const [key, value] of Object.entries(source.curves || {})) this.curves[key] = unpack(value, "f4");
    this.measured = source.curves ? this.curves.max_abs.length : 0;
    this.marks = source.marks ? unpack(source.marks, "u1") : null;
    this.golden = source.golden ? unpack(source.golden, "i4") : null;
    this.run = source.run ? unpack(source.run, "i4") : null;
    this.first = source.divergence === undefined ? null : source.divergence;
    this.full = source.full; // every value of every row is there, so NaN is no gap but a value
    this.place = this.first === null ? this.worstPlace() : Math.floor(this.first / this.per);
    this.block = 0;
    this.crosses = [];
    if (source.blocks) {
      const codes = unpack(source.blocks.values, "u2");
      this.values = Float32Array.from(codes, fromCode);
      this.count = source.blocks.count; this.size = source.blocks.size;
      this.block = this.worst(this.place);
    }
    if (this.per > 1)
      host.append(el("p", { class: "quiet" }, `${this.steps} ${what}s, in groups of ${this.per}: each place shows the worst of its group.`));
    if (this.marks) this.strip(host);
    if (this.values) this.heat(host);
    if (this.measured) {
      const errors = [[`Error by ${what}`, "max_abs", "err", 150], [`KL(golden ‖ run) by ${what}, nats`, "kl", "kl", 130], [`ULP distance by ${what}`, "max_ulp", "ulp", 130]];
      const quiet = errors.filter(([, key]) => this.curves[key].every((v) => v === 0));
      for (const [title, key, cls, height] of errors.filter((e) => !quiet.includes(e))) this.chart(host, title, [[key, cls, title]], height);
      if (quiet.length) {
        const names = { max_abs: "largest |run − golden|", kl: "KL", max_ulp: "ULP distance" };
        host.append(el("p", { class: "flat" }, el("b", {}, `0 at every ${this.measured < this.places ? `compared ${what}` : what}: `), quiet.map(([, key]) => names[key]).join(", "), "."));
      }
      this.chart(host, `Margin by ${what}: largest minus second largest logit`,
        [["golden_margin", "golden", "golden"], ["run_margin", "run", "run"]], 160);
    } else host.append(el("p", { class: "quiet" }, source.left_out ? "The curves of this sequence are left out: those of worse ones fill this file." : `No logits of any ${what} were measured: there are no curves to draw.`));
    this.table(host);
    this.tell();
  }
  worstPlace() { // where a reader wants to look first: the first fault, or the largest error
    const fault = this.marks ? this.marks.findIndex((m) => m === 4) : -1;
    if (fault >= 0 || !this.measured) return Math.max(0, fault);
    let best = 0;
    for (let p = 1; p < this.measured; p++) if (this.curves.max_abs[p] > this.curves.max_abs[best]) best = p;
    return best;
  }
  // where all values are there NaN is the worst of them; in partial logits it says that nothing is known
  worse(v, old) { return this.full ? !Number.isNaN(old) && (Number.isNaN(v) || v > old) : Number.isNaN(old) || v > old; }
  worst(place) { // the block with the largest error at a place
    let best = 0;
    if (place < this.measured)
      for (let b = 1; b < this.count; b++) {
        if (this.worse(this.values[place * this.count + b], this.values[place * this.count + best])) best = b;
      }
    return best;
  }
  value(v, digits) { return Number.isNaN(v) && this.full ? "not finite" : show(v, digits); }
  label(place) {
    const lo = place * this.per, hi = Math.min(this.steps, lo + this.per) - 1;
    return lo === hi ? `${this.what} ${lo}` : `${this.what}s ${lo}–${hi}`;
  }
  ids(block) { return `ids ${block * this.size}–${(block + 1) * this.size - 1}`; }
  width(node) { return Math.max(200, node.clientWidth); }
  x(place, width) { return GUTTER + ((width - GUTTER - RIGHT) * place) / this.places; }
  at(event, node) {
    const box = node.getBoundingClientRect();
    const share = (event.clientX - box.left - GUTTER) / (box.width - GUTTER - RIGHT);
    return Math.min(this.places - 1, Math.max(0, Math.floor(share * this.places)));
  }
  choose(place, block) {
    this.place = Math.min(this.places - 1, Math.max(0, place));
    if (block !== undefined && this.values) this.block = Math.min(this.count - 1, Math.max(0, block));
    this.tell();
  }
  cross(holder) { // the line through the chosen place, over a picture
    const line = el("div", { class: "cross" });
    holder.append(line);
    this.crosses.push([line, holder]);
  }
  tell() {
    for (const [line, holder] of this.crosses) {
      const w = this.width(holder);
      line.style.left = `${(this.x(this.place, w) + this.x(this.place + 1, w)) / 2}px`;
      line.style.top = "0"; line.style.height = "100%";
    }
    if (this.outline) this.outline();
    if (!this.readout) return;
    const say = [this.label(this.place)], p = this.place;
    if (this.golden) {
      const side = (tokens) => (tokens && p < tokens.length ? named(tokens[p]) : "nothing");
      say.push(`golden ${side(this.golden)}`, `run ${side(this.run)}`);
    }
    if (this.marks) say.push(MARKS[this.marks[p]]);
    if (p < this.measured) {
      if (this.values) {
        const v = this.values[p * this.count + this.block];
        say.push(`${this.ids(this.block)}: ${this.value(v)}`);
      }
      const c = this.curves;
      say.push(`max abs ${this.value(c.max_abs[p])}`, `ULP ${show(c.max_ulp[p])}`, `KL ${this.value(c.kl[p])}`);
      say.push(`margin golden ${show(c.golden_margin[p])}, run ${show(c.run_margin[p])}`);
    } else if (this.measured) say.push("logits not compared");
    this.readout.replaceChildren(...say.map((s) => el("span", {}, s)));
  }
  pointer(node, block) {
    const follow = (event) => this.choose(this.at(event, node), block ? block(event) : undefined);
    node.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") follow(event); });
    node.addEventListener("pointerdown", follow);
  }
  keys(node) {
    node.addEventListener("keydown", (event) => {
      const jump = Math.max(1, Math.round(this.places / 20));
      const moves = {
        ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageDown: [jump, 0], PageUp: [-jump, 0],
        Home: [-this.places, 0], End: [this.places, 0],
      };
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      if (event.key === "w") this.choose(this.place, this.worst(this.place));
      else if (moves[event.key]) this.choose(this.place + moves[event.key][0], this.block + moves[event.key][1]);
      else return;
      event.preventDefault();
    });
  }

  strip(host) {
    const holder = el("div", { class: "canvas" });
    const counts = Array(6).fill(0);
    for (const m of this.marks) counts[m]++;
    const unit = this.per > 1 ? "groups" : "steps";
    const said = counts.map((n, m) => (n ? `${n} ${MARKS[m]}` : null)).filter(Boolean).join(", ");
    const keys = [[1, "k-same"], [2, "k-equal"], [3, "k-tie"], [4, "k-differs"], [5, "k-differs"], [0, "k-none"]];
    host.append(el("figure", {}, el("figcaption", {}, "Step by step",
      legend(...keys.filter(([m]) => counts[m]).map(([m, key]) => [key, `${MARKS[m]} (${counts[m]})`]))), holder));
    const draw = () => {
      const w = this.width(holder), svg = sv("svg", { class: "strip", viewBox: `0 0 ${w} 26`, role: "img", "aria-label": `Step by step: ${said} (${unit})` });
      const gap = (w - GUTTER - RIGHT) / this.places > 5 ? 1 : 0;
      let from = 0;
      for (let i = 1; i <= this.places; i++) {
        if (!gap && i < this.places && this.marks[i] === this.marks[from]) continue;
        const m = this.marks[from], x = this.x(from, w), tall = m === 5 || m === 4 ? 24 : m === 3 ? 20 : 14;
        svg.append(sv("rect", { class: `m${m}`, x: x, y: 25 - tall, width: Math.max(m > 2 ? 1.5 : 0.5, this.x(i, w) - x - gap), height: tall, rx: gap ? 2 : 0 }));
        from = i;
      }
      holder.querySelector("svg")?.remove();
      holder.prepend(svg);
    };
    this.cross(holder);
    this.pointer(holder);
    this.add(draw, holder);
  }

  add(draw, holder) {
    const both = () => { if (holder.isConnected && holder.clientWidth) { draw(); this.tell(); } };
    redraws.add(both);
    new ResizeObserver(both).observe(holder);
    both();
  }

  heat(host) {
    const scale = scaleOf([this.values]), rows = this.count;
    const nans = this.values.some(Number.isNaN);
    const flat = !scale.any && !nans && !scale.odd, height = flat ? 56 : rows >= 48 ? rows * 4 : rows >= 16 ? rows * 8 : Math.max(40, rows * 14);
    const range = scale.any ? `from ${show(scale.lo)} to ${show(scale.hi)}` : "0 everywhere";
    const keyed = [];
    if (scale.any) keyed.push(["ramp", `${show(Math.min(scale.lo, scale.hi / 100), 2)} to ${show(scale.hi, 2)}, logarithmic`]);
    if (scale.zero) keyed.push(["k-zero", "no difference"]);
    if ((nans && this.full) || scale.odd) keyed.push(["k-nan", "not finite"]);
    if (this.measured < this.places) keyed.push(["k-gap", "not compared"]);
    if (nans && !this.full) keyed.push(["k-gap", "not known"]);
    const canvas = el("canvas"), cell = el("div", { class: "cell" });
    const holder = el("div", {
      class: "canvas", tabindex: "0", role: "application", "aria-roledescription": "heat map",
      "aria-label": `Heat map of the largest |run − golden| by ${this.what} and block of ${this.size} ids, ${range}. Arrow keys move.`,
    }, canvas, cell);
    this.readout = el("p", { class: "readout", role: "status", "aria-live": "polite" });
    host.append(el("figure", {}, el("figcaption", {}, `Error by ${this.what} and block of the vocabulary`, legend(...keyed)), holder, this.readout,
      el("p", { class: "quiet keys" }, el("kbd", {}, "←"), " ", el("kbd", {}, "→"), ` move over ${this.what}s, `, el("kbd", {}, "↑"), " ", el("kbd", {}, "↓"),
        " over blocks, ", el("kbd", {}, "w"), " goes to the worst block, ", el("kbd", {}, "Home"), " and ", el("kbd", {}, "End"), " to the ends.")));
    const draw = () => {
      const w = this.width(holder), ratio = Math.max(1, window.devicePixelRatio || 1), top = 4, bottom = 20;
      canvas.width = Math.round(w * ratio); canvas.height = Math.round((height + top + bottom) * ratio);
      canvas.style.height = `${height + top + bottom}px`;
      const pen = canvas.getContext("2d");
      pen.scale(ratio, ratio);
      const stops = ["--h0", "--h1", "--h2", "--h3", "--h4", "--h5"].map((n) => hex(colour(n)));
      const zero = colour("--zero"), gone = colour("--gap"), odd = colour("--nan"), nan = this.full ? odd : gone, shades = Array.from({ length: 256 }, (_, i) => mix(stops, i / 255));
      const inner = w - GUTTER - RIGHT, one = inner / this.places, cellHeight = height / rows;
      pen.fillStyle = colour("--gap");
      pen.fillRect(GUTTER, top, inner, height);
      // a column a device pixel at most: the worst of the places under it
      const columns = Math.min(this.places, Math.max(1, Math.floor(inner * ratio)));
      for (let column = 0; column < columns; column++) {
        const from = Math.floor((column * this.places) / columns), to = Math.max(from + 1, Math.floor(((column + 1) * this.places) / columns));
        if (from >= this.measured) break;
        const x = GUTTER + (inner * column) / columns, width = inner / columns;
        for (let b = 0; b < rows; b++) {
          let v = this.values[from * rows + b];
          for (let p = from + 1; p < to && p < this.measured; p++) {
            const other = this.values[p * rows + b];
            if (this.worse(other, v)) v = other;
          }
          pen.fillStyle = v === 0 ? zero : Number.isNaN(v) ? nan : v === Infinity ? odd : shades[Math.min(255, Math.round(255 * Math.max(0.04, span(scale, v))))];
          const gap = one > 6 ? 1 : 0;
          pen.fillRect(x, top + b * cellHeight, width - gap + (gap ? 0 : 0.6), cellHeight - (gap && cellHeight > 6 ? 1 : 0) + (gap && cellHeight > 6 ? 0 : 0.4));
        }
      }
      pen.fillStyle = colour("--soft"); pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
      pen.textAlign = "right"; pen.textBaseline = "middle";
      for (const share of flat ? [0] : [0, 0.25, 0.5, 0.75]) {
        const block = Math.floor(share * rows);
        if (share && block * cellHeight < share * height - cellHeight) continue;
        pen.fillText(`id ${block * this.size}`, GUTTER - 6, Math.max(top + 6, top + (block + 0.5) * cellHeight));
      }
      pen.textAlign = "center"; pen.textBaseline = "top";
      for (const step of ticks(this.steps, inner)) pen.fillText(String(step), this.x(step / this.per, w) + Math.min(one, 40) / 2, top + height + 5);
      if (this.first !== null) {
        pen.strokeStyle = colour("--bad"); pen.lineWidth = 1.5; pen.setLineDash([4, 3]);
        const x = Math.round(this.x(Math.floor(this.first / this.per), w)) - 0.5;
        pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, top + height); pen.stroke();
      }
      this.outline = () => {
        cell.hidden = this.place >= this.measured;
        cell.style.left = `${this.x(this.place, w) - 2}px`; cell.style.width = `${Math.max(3, one) + 3}px`;
        cell.style.top = `${flat ? top - 2 : top + this.block * cellHeight - 2}px`; cell.style.height = `${flat ? height + 3 : cellHeight + 3}px`;
      };
    };
    this.pointer(holder, (event) => {
      const box = canvas.getBoundingClientRect();
      return Math.floor(((event.clientY - box.top - 4) / height) * rows);
    });
    this.keys(holder);
    this.add(draw, holder);
  }

  /* Curves over steps on a logarithmic scale; 0 has a line of its own below, "not finite" a mark at the top. */
  chart(host, title, series, height) {
    const known = series.filter(([key]) => this.full || this.curves[key].some((v) => !Number.isNaN(v)));
    const holder = el("div", { class: "canvas" });
    const keyed = series.length > 1 ? series.map(([, cls, word]) => [`thin k-${cls}`, word]) : [];
    const ties = series.length > 1 ? this.ties() : [];
    if (ties.length) keyed.push(["k-tie", "a tie"]);
    const figure = el("figure", {}, el("figcaption", {}, title, legend(...keyed)), holder);
    if (!known.length) {
      figure.append(el("p", { class: "quiet" }, "Not known: these logits are partial."));
      host.append(figure);
      return;
    }
    host.append(figure);
    const scale = scaleOf(known.map(([key]) => this.curves[key]));
    const draw = () => {
      const w = this.width(holder), base = height - 22, top = 24, floor = base - 17;
      const said = scale.any ? `${show(scale.lo)} to ${show(scale.hi)}` : "0 everywhere";
      const svg = sv("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": `${title}: ${said}. The table below has every value.` });
      const y = (v) => (v === 0 ? base : !Number.isFinite(v) ? top - 6 : floor - (floor - top) * scale.at(v));
      if (this.measured < this.places)
        svg.append(sv("rect", { class: "f-gap", x: this.x(this.measured, w), y: top - 8, width: w - RIGHT - this.x(this.measured, w), height: base - top + 8 }));
      svg.append(sv("path", { class: "axis", d: `M${GUTTER} ${base}H${w - RIGHT}` }), sv("text", { x: GUTTER - 6, y: base + 4, "text-anchor": "end" }, "0"));
      if (scale.any) {
        const every = Math.max(1, Math.ceil((scale.to - scale.from) / Math.max(2, Math.floor((floor - top) / 22))));
        for (let e = scale.from; e <= scale.to; e += every) {
          const at = floor - ((floor - top) * (e - scale.from)) / (scale.to - scale.from);
          svg.append(sv("path", { class: "axis", d: `M${GUTTER} ${at}H${w - RIGHT}` }), sv("text", { x: GUTTER - 6, y: at + 4, "text-anchor": "end" }, Math.abs(e) < 4 ? String(Number((10 ** e).toPrecision(1))) : `1e${e}`));
        }
      }
      for (const step of ticks(this.steps, w - GUTTER)) {
        const one = (w - GUTTER - RIGHT) / this.places;
        svg.append(sv("text", { x: this.x(step / this.per, w) + Math.min(one, 40) / 2, y: height - 4, "text-anchor": "middle" }, String(step)));
      }
      for (const [key, cls] of known) this.line(svg, this.curves[key], cls, w, y, base, series.length === 1);
      for (const place of ties) {
        const v = this.curves.golden_margin[place];
        if (!Number.isNaN(v)) svg.append(sv("circle", { class: "ring", cx: this.middle(place, w), cy: y(v), r: 6 }, sv("title", {}, `${this.label(place)}: a tie`)));
      }
      if (this.first !== null) {
        const x = this.x(Math.floor(this.first / this.per), w), left = x > w * 0.6;
        svg.append(sv("path", { class: "first", d: `M${x} 2V${base}` }),
          sv("text", { class: "first-text", x: x + (left ? -5 : 5), y: 11, "text-anchor": left ? "end" : "start" }, `first divergence, ${this.what} ${this.first}`));
      }
      holder.querySelector("svg")?.remove();
      holder.prepend(svg);
    };
    this.cross(holder);
    this.pointer(holder);
    this.add(draw, holder);
  }
  middle(place, w) { return (this.x(place, w) + this.x(place + 1, w)) / 2; }
  ties() {
    const out = [];
    for (let p = 0; p < this.measured; p++) if (this.curves.golden_margin[p] === 0 || (this.marks && this.marks[p] === 3)) out.push(p);
    return out;
  }
  line(svg, values, cls, w, y, base, stems) {
    let path = "", pen = false, under = "", dots = values.length <= 80;
    for (let p = 0; p < values.length; p++) {
      const v = values[p];
      if (Number.isNaN(v) && !(this.full && stems)) { pen = false; continue; }
      const x = this.middle(p, w).toFixed(1), h = y(v).toFixed(1);
      if (!Number.isFinite(v)) {
        svg.append(sv("path", { class: "f-nan", d: `M${x} ${h - 4}l4 7h-8z` }, sv("title", {}, `${this.label(p)}: not finite`)));
        pen = false;
        continue;
      }
      path += `${pen ? "L" : "M"}${x} ${h}`;
      if (stems && v !== 0) under += `M${x} ${base}V${h}`;
      if (dots && cls !== "golden") svg.append(sv("circle", { class: `f-${cls}`, cx: x, cy: h, r: 2.6 }));
      pen = true;
    }
    if (under) svg.append(sv("path", { class: `s-${cls}`, d: under, fill: "none", "stroke-width": dots ? 2 : 1, opacity: dots ? 0.35 : 0.18 }));
    svg.append(sv("path", { class: `curve s-${cls}${!stems && cls === "golden" ? " under" : ""}`, d: path }));
  }

  table(host) { // every value that is drawn
    const c = this.curves, said = `Table of every ${this.what}`;
    const details = el("details", {}, el("summary", {}, said));
    host.append(details);
    once(details, () => {
      const head = [this.per > 1 ? `${this.what}s` : this.what];
      if (this.golden) head.push("golden", "run");
      if (this.marks) head.push("");
      if (this.measured) head.push("max abs", "ULP", "KL", "margin golden", "margin run");
      const body = [];
      for (let p = 0; p < this.places; p++) {
        const row = [this.label(p).replace(/^\D+/, "")];
        if (this.golden) row.push(...[this.golden, this.run].map((t) => (t && p < t.length ? named(t[p]) : "–")));
        if (this.marks) row.push(MARKS[this.marks[p]]);
        if (this.measured) row.push(...(p < this.measured ? [c.max_abs, c.max_ulp, c.kl, c.golden_margin, c.run_margin].map((v) => this.value(v[p], 4)) : Array(5).fill("–")));
        body.push(row);
      }
      details.append(tableOf(said, head, body));
      if (this.values) details.append(this.blocksTable());
    });
  }
  blocksTable() { // the heat map in numbers: the worst block of each place
    const body = [];
    for (let p = 0; p < this.measured; p++) {
      const b = this.worst(p), v = this.values[p * this.count + b];
      body.push([this.label(p).replace(/^\D+/, ""), v === 0 ? "none differs" : this.ids(b), this.value(v)]);
    }
    const title = `The block of ${this.size} ids with the largest error, by ${this.what}`;
    return el("div", {}, el("p", { class: "quiet" }, title), tableOf(title, [this.what, "block", "largest |run − golden|"], body));
  }
}
