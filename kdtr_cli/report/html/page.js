/* Shows one sequence at a time, and draws it when it is first shown. */

const sections = [...document.querySelectorAll("section.seq")], drawn = new Set(), pick = document.getElementById("pick");
function draw(section) {
  if (drawn.has(section)) return;
  drawn.add(section);
  const source = data.sequences.find((s) => String(s.index) === section.dataset.seq);
  const host = (name) => section.querySelector(`[data-draw="${name}"]`);
  if (source.steps) new Plots(host("plots"), source, "step");
  if (source.prompt) {
    const details = el("details", {}, el("summary", {}, "Logits of the prompt, by position")), inside = el("div");
    details.append(inside);
    host("plots").append(details);
    once(details, () => new Plots(inside, source.prompt, "position"));
  }
  if (source.trace) drawTrace(host("trace"), source.trace);
  if (source.rounds) drawRounds(host("rounds"), source.rounds);
}
function choose(section) {
  for (const other of sections) other.hidden = other !== section;
  if (pick) pick.value = section.id;
  draw(section);
}
const wanted = () => sections.find((s) => `#${s.id}` === location.hash);
if (sections.length) choose(wanted() || sections[0]);
window.addEventListener("hashchange", () => { const s = wanted(); if (s) { choose(s); s.scrollIntoView(); } });
if (pick) {
  pick.closest("label").hidden = false;
  pick.addEventListener("change", () => choose(document.getElementById(pick.value)));
}
const theme = document.querySelector(".theme");
theme.hidden = false;
theme.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.themeTo === "auto") delete root.dataset.theme;
  else root.dataset.theme = button.dataset.themeTo;
  for (const b of theme.querySelectorAll("button")) b.setAttribute("aria-pressed", String(b === button));
  redrawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
root.dataset.ready = "yes";
