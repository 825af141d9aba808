/* The error of every tensor, in the order of execution. */

function drawTrace(host, tensors) {
  const values = tensors.map((t) => (t.error === null ? NaN : Number(t.error === "inf" ? Infinity : t.error)));
  const scale = scaleOf([values]), height = 190, holder = el("div", { class: "canvas" });
  host.append(el("figure", {}, el("figcaption", {}, "Error by tensor, in the order of execution",
    legend(["k-same", "same bits"], ["k-equal", "within tolerance"], ["k-differs", "out of tolerance"])), holder));
  const draw = () => {
    if (!holder.clientWidth) return;
    const w = Math.max(200, holder.clientWidth), base = height - 30, floor = base - 17, top = 28, one = (w - GUTTER - RIGHT) / tensors.length;
    const svg = sv("svg", { viewBox: `0 0 ${w} ${height}`, role: "img", "aria-label": `Largest error of ${tensors.length} tensors; the list below has every value.` });
    const y = (v) => (v === 0 ? base : !Number.isFinite(v) ? top - 4 : floor - (floor - top) * scale.at(v));
    const x = (i) => GUTTER + one * (i + 0.5);
    svg.append(sv("path", { class: "axis", d: `M${GUTTER} ${base}H${w - RIGHT}` }), sv("text", { x: GUTTER - 6, y: base + 4, "text-anchor": "end" }, "0"));
    if (scale.any) for (let e = scale.from; e <= scale.to; e += Math.max(1, Math.ceil((scale.to - scale.from) / 6))) {
      const at = floor - ((floor - top) * (e - scale.from)) / (scale.to - scale.from);
      svg.append(sv("path", { class: "axis", d: `M${GUTTER} ${at}H${w - RIGHT}` }), sv("text", { x: GUTTER - 6, y: at + 4, "text-anchor": "end" }, `1e${e}`));
    }
    let said = -Infinity;
    tensors.forEach((t, i) => {
      if (t.layer !== null && (i === 0 || tensors[i - 1].layer !== t.layer)) {
        svg.append(sv("path", { class: "axis", d: `M${x(i) - one / 2} ${top}V${base + 5}` }));
        if (x(i) - said > 26) { svg.append(sv("text", { x: x(i) - one / 2 + 3, y: height - 12 }, String(t.layer))); said = x(i); }
      }
    });
    svg.append(sv("text", { x: GUTTER - 6, y: height - 12, "text-anchor": "end" }, "layer"));
    svg.append(sv("path", { class: "curve s-err", opacity: 0.5, d: values.map((v, i) => (Number.isNaN(v) ? "" : `${i && !Number.isNaN(values[i - 1]) ? "L" : "M"}${x(i)} ${y(v)}`)).join("") }));
    tensors.forEach((t, i) => {
      // integers (ids of experts) have no size of an error: below where they are the same, at the top where not
      const v = t.error === null ? (t.state === "same" ? 0 : Infinity) : values[i];
      svg.append(sv("circle", { class: Number.isFinite(v) || t.error === null ? `f-${t.state}` : "f-nan", cx: x(i), cy: y(v), r: t.first ? 5 : Math.min(3.2, Math.max(1.6, one / 2.4)) }, sv("title", {}, `${t.name}: ${t.error === null ? (t.state === "same" ? "the same" : "other values") : show(values[i])}`)));
      if (t.first) {
        const left = x(i) > w * 0.5, room = Math.floor(((left ? x(i) : w - x(i)) - 8) / 6.4), name = `first that parts: ${t.name}`;
        const label = name.length <= room ? name : `first: …${t.name.slice(-Math.max(4, room - 8))}`;
        svg.append(sv("path", { class: "first", d: `M${x(i)} 4V${base}` }), sv("text", { class: "first-text", x: x(i) + (left ? -6 : 6), y: 11, "text-anchor": left ? "end" : "start" }, label));
      }
    });
    holder.replaceChildren(svg);
  };
  redraws.add(draw);
  new ResizeObserver(draw).observe(holder);
  draw();
}
