/* The data, nodes, numbers and scales. No markup is made from strings: texts become text nodes. */

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const MARKS = ["not compared", "same bits", "same token, logits differ or unknown", "tie", "logits out of tolerance", "another token"];

const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const sv = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) node.setAttribute(key, value);
  node.append(...children.filter((c) => c !== null));
  return node;
}
const ARRAYS = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };
function unpack(text, kind) {
  if (text === null) return null;
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const Type = ARRAYS[kind], size = Type.BYTES_PER_ELEMENT;
  if (size === 1) return raw;
  const out = new Type(raw.length / size), view = new DataView(raw.buffer);
  const get = { u2: "getUint16", i4: "getInt32", f4: "getFloat32" }[kind];
  for (let i = 0; i < out.length; i++) out[i] = view[get](i * size, true);
  return out;
}
const bits = new Uint32Array(1), single = new Float32Array(bits.buffer);
const fromCode = (code) => ((bits[0] = code * 65536), single[0]); // a bfloat16
function show(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "−inf";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e-3 && size < 1e5 ? String(Number(x.toPrecision(digits))) : x.toExponential(digits - 1);
}
function ticks(n, width) {
  const rough = n / Math.max(2, Math.floor(width / 80)), power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || 1);
  const out = [];
  for (let i = 0; i < n; i += step) out.push(i);
  return out;
}
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const text = (token) => data.texts[token];
const named = (token) => (text(token) === undefined ? String(token) : `${token} "${text(token)}"`);
const legend = (...entries) =>
  el("span", { class: "legend" }, ...entries.map(([cls, word]) => el("span", {}, el("b", { class: cls }), word)));
const redraws = new Set();
let queued = false;
function redrawAll() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; for (const draw of redraws) draw(); });
}

// A scale of errors: logarithmic, with places for 0 and for what is not finite.
function scaleOf(arrays) {
  let lo = Infinity, hi = 0, odd = false, zero = false;
  for (const values of arrays) for (const v of values) {
    if (v > 0 && v < Infinity) { if (v < lo) lo = v; if (v > hi) hi = v; }
    else if (v === 0) zero = true;
    else if (v === Infinity) odd = true;
  }
  const any = hi > 0;
  const from = any ? Math.floor(Math.log10(lo)) : 0, to = any ? Math.max(from + 1, Math.ceil(Math.log10(hi))) : 1;
  return { any, lo, hi, odd, zero, from, to, at: (v) => (Math.log10(v) - from) / (to - from) };
}

// two decades at least, so that errors of about one size have about one colour
const span = (scale, v) => { const lo = Math.min(scale.lo, scale.hi / 100); return (Math.log(v) - Math.log(lo)) / (Math.log(scale.hi) - Math.log(lo)); };
const hex = (c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16));
function mix(stops, share) {
  const at = share * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at)), f = at - i;
  return `rgb(${stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * f)).join(",")})`;
}
function once(details, make) {
  details.addEventListener("toggle", () => { if (details.open && make) { make(); make = null; } });
}
function tableOf(title, head, body) {
  const cells = (tag, row) => el("tr", {}, ...row.map((c) => el(tag, tag === "th" ? { scope: "col" } : {}, c)));
  return el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": title },
    el("table", {}, el("caption", { class: "hidden" }, title), el("thead", {}, cells("th", head)), el("tbody", {}, ...body.map((row) => cells("td", row)))));
}
