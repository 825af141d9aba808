/* The rounds: a bar a round, and the chosen one as a tree. */

function open(side) { // the arrays of a side, round by round
  if (!side) return null;
  const tokens = unpack(side.tokens, "i4"), parents = unpack(side.parents, "i4"), scores = unpack(side.scores, "f4"), accepted = unpack(side.accepted, "i4");
  let node = 0, taken = 0;
  const list = side.start.map((start, i) => {
    const n = side.n_nodes[i], a = side.n_accepted[i];
    const round = {
      number: side.from + i, start, root: side.root[i], bonus: side.bonus[i], accepted: Array.from(accepted.subarray(taken, taken + a)),
      tokens: [side.root[i], ...tokens.subarray(node, node + n)], parents: [-1, ...parents.subarray(node, node + n)], scores: [0, ...scores.subarray(node, node + n)],
    };
    node += n; taken += a;
    return round;
  });
  return { list, from: side.from, total: side.total };
}
const sameRound = (a, b) => a && b && ["start", "root", "bonus"].every((k) => a[k] === b[k]) && ["tokens", "parents", "accepted", "scores"].every((k) => String(a[k]) === String(b[k]));

function drawRounds(host, rounds) {
  const golden = open(rounds.golden), run = rounds.same ? golden : open(rounds.run), main = golden || run;
  const find = (side, number) => (side ? side.list.find((r) => r.number === number) : undefined);
  const numbers = [...new Set([...(golden ? golden.list : []), ...(run ? run.list : [])].map((r) => r.number))].sort((a, b) => a - b);
  const most = Math.max(2, ...main.list.map((r) => r.accepted.length));
  const state = (n) => (!rounds.compared || !golden || !run ? "alone" : rounds.same || sameRound(find(golden, n), find(run, n)) ? "same" : "other");
  const total = Math.max(golden ? golden.total : 0, run ? run.total : 0);
  const keyed = rounds.compared ? [["k-same", "both sides alike"], ["k-differs", "sides differ"]] : [["k-soft", "not compared"]];
  const list = el("div", { class: `rounds${numbers.length > 80 ? " many" : ""}`, role: "listbox", tabindex: "0", "aria-label": "Rounds; left and right choose one", "aria-orientation": "horizontal" });
  const panel = el("div");
  host.append(el("h3", {}, "Rounds"), el("figure", {}, el("figcaption", {}, "Accepted rows a round", legend(...keyed)), list), panel);
  if (numbers.length < total) list.before(el("p", { class: "quiet" }, `Rounds ${numbers[0]} to ${numbers[numbers.length - 1]} of ${total} are in this file.`));
  if (rounds.difference) list.before(el("p", {}, "First difference in ", el("b", {}, rounds.difference.where), "."));
  const id = `${host.closest("section").id}-round-`;
  const options = numbers.map((n) => {
    const r = find(golden, n) || find(run, n), bar = el("i");
    bar.style.height = `${Math.max(6, (100 * r.accepted.length) / most)}%`;
    const title = `round ${n}: position ${r.start}, ${r.accepted.length} accepted of ${r.tokens.length} rows`;
    const option = el("span", { role: "option", id: id + n, class: state(n), title, "aria-label": `${title}${state(n) === "other" ? ", sides differ" : ""}`, "aria-selected": "false" }, bar);
    option.addEventListener("click", () => choose(numbers.indexOf(n)));
    list.append(option);
    return option;
  });
  let at = -1;
  function choose(i) {
    i = Math.min(numbers.length - 1, Math.max(0, i));
    if (i === at) return;
    if (at >= 0) options[at].setAttribute("aria-selected", "false");
    at = i;
    options[at].setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", options[at].id);
    const top = options[at].offsetTop - list.offsetTop;
    if (top < list.scrollTop || top + 44 > list.scrollTop + list.clientHeight) list.scrollTop = top - 50;
    panel.replaceChildren(...roundPanel(numbers[at]));
  }
  list.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, PageDown: at + 10, PageUp: at - 10, Home: 0, End: numbers.length - 1 }[event.key];
    if (to === undefined) return;
    choose(to);
    event.preventDefault();
  });
  function roundPanel(n) {
    const g = find(golden, n), r = find(run, n), one = state(n) === "same" || !g || !r;
    const facts = (x) => `position ${x.start}, ${x.tokens.length - 1} nodes, ${x.accepted.length} rows accepted, bonus ${named(x.bonus)}`;
    if (one) {
      const who = state(n) === "same" ? "both sides alike" : g ? "golden" : "run";
      return [el("p", {}, el("b", {}, `Round ${n}`), ` (${who}): ${facts(g || r)}.`), ...tree(g || r, null, "")];
    }
    return [el("p", {}, el("b", {}, `Round ${n}`), ", golden: ", facts(g), "."), ...tree(g, r, "golden"), el("p", {}, el("b", {}, `Round ${n}`), ", run: ", facts(r), "."), ...tree(r, g, "run")];
  }
  const details = el("details", {}, el("summary", {}, "Table of all rounds"));
  host.append(details);
  once(details, () => {
    const row = (n) => {
      const r = find(golden, n) || find(run, n);
      return [String(n), String(r.start), String(r.tokens.length - 1), String(r.accepted.length), named(r.bonus), { same: "alike", other: "differ", alone: "" }[state(n)]];
    };
    details.append(tableOf("Rounds", ["round", "position", "nodes", "accepted", "bonus", "sides"], numbers.map(row)));
  });
  choose(rounds.difference ? Math.max(0, numbers.indexOf(rounds.difference.round)) : 0);
}

/* A tree from left to right, a column a depth; the accepted path is thick and ends in the bonus. */
function tree(round, other, side) {
  const n = round.tokens.length, kids = Array.from({ length: n }, () => []), depth = Array(n).fill(0);
  for (let i = 1; i < n; i++) { kids[round.parents[i]].push(i); depth[i] = depth[round.parents[i]] + 1; }
  const row = Array(n).fill(0), path = new Set(round.accepted), last = round.accepted[round.accepted.length - 1];
  let leaves = 0;
  const stack = [[0, false]];
  while (stack.length) { // children before their parent
    const [i, done] = stack.pop();
    if (done) row[i] = (row[kids[i][0]] + row[kids[i][kids[i].length - 1]]) / 2;
    else if (!kids[i].length) row[i] = leaves++;
    else { stack.push([i, true]); for (let k = kids[i].length - 1; k >= 0; k--) stack.push([kids[i][k], false]); }
  }
  const word = (token) => { const t = text(token); return t === undefined ? String(token) : [...t].slice(0, 9).join(""); };
  const W = 74, STEP = 108, H = 20, ROW = 27, bonusRow = kids[last].length ? leaves++ : row[last];
  const width = (Math.max(...depth, depth[last] + 1) + 1) * STEP, height = leaves * ROW + 6;
  const X = (i) => depth[i] * STEP + 2, Y = (r) => r * ROW + 4;
  const svg = sv("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Tree of round ${round.number}${side ? `, ${side}` : ""}: ${n - 1} nodes, accepted path ${round.accepted.map((i) => named(round.tokens[i])).join(", ")}, bonus ${named(round.bonus)}. The text below says it too.` });
  const edge = (x1, y1, x2, y2, cls) => svg.append(sv("path", { class: cls, d: `M${x1} ${y1 + H / 2}C${x1 + 18} ${y1 + H / 2} ${x2 - 18} ${y2 + H / 2} ${x2} ${y2 + H / 2}` }));
  for (let i = 1; i < n; i++) edge(X(round.parents[i]) + W, Y(row[round.parents[i]]), X(i), Y(row[i]), path.has(i) ? "edge yes" : "edge");
  const bonusX = (depth[last] + 1) * STEP + 2;
  edge(X(last) + W, Y(row[last]), bonusX, Y(bonusRow), "edge yes");
  const pill = (x, y, cls, label, title) => svg.append(sv("g", { class: `node ${cls}` }, sv("title", {}, title), sv("rect", { x, y, width: W, height: H, rx: 10 }), sv("text", { x: x + W / 2, y: y + 14, "text-anchor": "middle" }, label)));
  for (let i = 0; i < n; i++) {
    const differs = other && (i >= other.tokens.length || other.tokens[i] !== round.tokens[i] || other.parents[i] !== round.parents[i]);
    const title = `node ${i}, token ${named(round.tokens[i])}, ${i ? `score ${show(round.scores[i], 4)}` : "root"}${path.has(i) ? ", accepted" : ""}${differs ? ", the other side has another" : ""}`;
    pill(X(i), Y(row[i]), differs ? "other" : path.has(i) ? "yes" : "", word(round.tokens[i]), title);
  }
  pill(bonusX, Y(bonusRow), "bonus", word(round.bonus), `bonus ${named(round.bonus)}`);
  const details = el("details", {}, el("summary", {}, "The tree as text"));
  once(details, () => {
    const lines = [], walk = [[0, ""]];
    while (walk.length) {
      const [i, indent] = walk.pop();
      lines.push(`${indent}[${i}] ${named(round.tokens[i])} ${i ? `score ${show(round.scores[i], 4)}` : `root at ${round.start}`}${path.has(i) ? "  accepted" : ""}${i === last ? `  -> bonus ${named(round.bonus)}` : ""}`);
      for (let k = kids[i].length - 1; k >= 0; k--) walk.push([kids[i][k], indent + "    "]);
    }
    details.append(el("pre", { tabindex: "0" }, lines.join("\n")));
  });
  return [el("div", { class: "tree", tabindex: "0", role: "region", "aria-label": `Tree of round ${round.number} ${side}` }, svg), details];
}
