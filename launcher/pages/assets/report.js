// Zooms the timeline and all curves together. Without JavaScript, the page lacks only the curves.
const reset = document.getElementById("reset");
const inner = document.getElementById("zoom");
const near = (a, b) => Math.abs(a - b) < 1e-6 * page.duration;
const zoom = (wanted) => {
  const least = Math.max(wanted[0], 0), most = Math.min(wanted[1], page.duration);
  if (!(most - least > page.duration * 1e-6) || (near(least, view[0]) && near(most, view[1]))) return;
  view = [least, most];
  untell();
  redraw();
  if (!inner) return;
  const width = page.duration / (most - least);
  inner.setAttribute("width", `${100 * width}%`);
  inner.setAttribute("x", `${(-100 * least) / (most - least)}%`);
  drawAxis();
  reset.hidden = near(least, 0) && near(most, page.duration);
};

const drawAxis = () => {
  const axis = document.getElementById("axis");
  const length = view[1] - view[0];
  const room = Math.max(Math.floor(axis.getBoundingClientRect().width / 80), 2);
  const step = timeStep(length, room);
  axis.replaceChildren();
  for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1] - length * 0.03; tick += step) {
    const x = `${(100 * (tick - view[0])) / length}%`;
    svg("line", { x1: x, x2: x, y1: 0, y2: 5 }, axis);
    svg("text", { x, y: 16 }, axis).textContent = clock(tick);
  }
};

const lanes = document.getElementById("lanes");
if (lanes) {
  const texts = new WeakMap();
  const textOf = (target) => {
    const part = target.closest?.("rect, .mark");
    if (!part || !inner.contains(part)) return "";
    const title = part.querySelector(":scope > title");
    if (title) {
      texts.set(part, title.textContent);
      title.remove(); // or the browser also shows its own tooltip a second later
    }
    return texts.get(part) ?? "";
  };
  let from = null, shade = null;
  const at = (event) => {
    const box = lanes.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
  };
  lanes.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = at(event);
    shade = svg("rect", { class: "shade", x: `${from * 100}%`, width: "0%", y: 0, height: "100%" }, lanes.firstElementChild);
    lanes.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  lanes.addEventListener("pointermove", (event) => {
    if (from !== null) {
      const to = at(event);
      shade.setAttribute("x", `${Math.min(from, to) * 100}%`);
      shade.setAttribute("width", `${Math.abs(to - from) * 100}%`);
    }
    const text = from === null ? textOf(event.target) : "";
    tip.hidden = !text;
    tip.textContent = text;
    placeTip(event);
  });
  lanes.addEventListener("pointerleave", () => { tip.hidden = true; });
  const release = (event) => {
    if (from === null) return;
    const [least, most] = [from, at(event)].sort((a, b) => a - b);
    from = null;
    shade.remove();
    const length = view[1] - view[0];
    if (event.type === "pointerup" && (most - least) * lanes.getBoundingClientRect().width > 5) {
      zoom([view[0] + least * length, view[0] + most * length]);
    }
  };
  lanes.addEventListener("pointerup", release);
  lanes.addEventListener("pointercancel", release);
  lanes.addEventListener("dblclick", () => zoom(full));
  reset.addEventListener("click", () => zoom(full));
  drawAxis();
}

let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { redraw(); if (lanes) drawAxis(); }, 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", () => { root.classList.add("printing"); places.forEach(draw); });
addEventListener("afterprint", () => { root.classList.remove("printing"); redraw(); });

// A link to an element in a closed part opens the part.
const open = () => {
  let target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (const start = target; target; target = target.parentElement) {
    if (target.tagName === "DETAILS") { target.open = true; start.scrollIntoView(); }
  }
};
addEventListener("hashchange", open);
open();
