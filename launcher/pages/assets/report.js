// Draws the curves when they come into view, zooms all of them and the timeline together, and says what is under the
// pointer. Without it, the page has everything else. All text goes into the page as text.
"use strict";
(() => {
  const root = document.documentElement;
  const page = JSON.parse(document.getElementById("page").textContent);
  const full = [0, page.duration];
  let view = full;
  const charts = new Map();
  root.classList.add("js");

  const clock = (seconds) => {
    const fine = view[1] - view[0] < 20;
    let left = Math.max(fine ? Math.round(seconds * 10) / 10 : Math.round(seconds), 0);
    const two = (value) => String(value).padStart(2, "0");
    const days = Math.floor(left / 86400);
    left -= days * 86400;
    const hours = Math.floor(left / 3600);
    const minutes = Math.floor((left / 60) % 60);
    const rest = left % 60;
    const tail = fine ? rest.toFixed(1).padStart(4, "0") : two(Math.floor(rest));
    const time = hours || days ? `${hours}:${two(minutes)}:${tail}` : `${minutes}:${tail}`;
    return days ? `${days} d ${time}` : time;
  };

  const short = (value) => String(Number(value.toPrecision(4)));
  const show = (value, unit) => {
    if (value == null) return "–";
    if (unit === "B" || unit === "B/s") {
      const prefixes = ["", "Ki", "Mi", "Gi", "Ti"];
      let at = 0;
      while (Math.abs(value) >= 1024 && at < 4) { value /= 1024; at += 1; }
      return `${Number(value.toPrecision(3))} ${prefixes[at]}${unit}`;
    }
    if (unit === "s") return Math.abs(value) < 1 ? `${short(value * 1000)} ms` : `${short(value)} s`;
    return unit === "%" ? `${short(value)} %` : short(value);
  };

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const decode = (series) => {
    let now = 0;
    return [series.x.map((step) => (now += step) / 1000), series.y];
  };

  // A gap of a curve reaches from its last value to its next, however many moments of other curves lie between.
  const widenGaps = (values) => {
    let last = -1, isGap = false;
    values.forEach((value, at) => {
      if (value === null) isGap = true;
      if (value == null) return;
      if (isGap) values.fill(null, last + 1, at);
      [last, isGap] = [at, false];
    });
    return values;
  };

  // The value of a curve that is nearest to the pointer: the curves were not measured at the same moments.
  const nearest = (plot, index, at) => {
    const values = plot.data[index];
    if (index === 0 || values[at] != null) return at;
    const times = plot.data[0];
    let before = at, after = at;
    while (before > 0 && values[before] == null) before -= 1;
    while (after < values.length - 1 && values[after] == null) after += 1;
    if (values[before] == null) return values[after] == null ? null : after;
    if (values[after] == null) return before;
    return times[at] - times[before] <= times[after] - times[at] ? before : after;
  };

  const drawRestarts = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--restart");
    ctx.setLineDash([4, 4]);
    const shown = page.restarts.filter((time) => time >= view[0] && time <= view[1]);
    for (const time of shown.length > 30 ? [] : shown) {
      const x = plot.valToPos(time, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  const range = (unit) => (_plot, least, most) => {
    if (least == null || most == null) return [0, 1];
    if (unit) return [0, most > 0 ? most * 1.08 : 1];
    const pad = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
    return [least - pad, most + pad];
  };

  const steps = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const binary = Array.from({ length: 45 }, (_, power) => 2 ** power);

  const draw = (place) => {
    const data = JSON.parse(document.getElementById(`data-${place.dataset.chart}`).textContent);
    const tables = data.series.map(decode);
    const text = colour("--dim"), line = colour("--line");
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
    charts.get(place)?.destroy();
    const plot = new uPlot({
      width: Math.max(Math.floor(place.getBoundingClientRect().width), 200),
      height: 220,
      cursor: {
        sync: { key: "run", setSeries: false },
        dataIdx: nearest,
        drag: { x: true, y: false },
        focus: { prox: 24 },
        bind: { dblclick: () => () => { zoom(full); return null; } },
      },
      focus: { alpha: 0.35 },
      scales: { x: { time: false, range: (_plot, least, most) => [least, most] }, y: { range: range(data.unit) } },
      axes: [
        { ...axis, space: 70, incrs: steps, values: (_plot, ticks) => ticks.map(clock) },
        {
          ...axis,
          ...(data.unit.startsWith("B") ? { incrs: binary } : {}),
          size: 68,
          values: (_plot, ticks) => ticks.map((tick) => show(tick, data.unit)),
        },
      ],
      series: [
        { label: "time", value: (_plot, value) => (value == null ? "–" : clock(value)) },
        ...data.series.map((each, index) => ({
          label: each.label,
          stroke: colour(`--c${index % 8}`),
          width: data.series.length > 4 ? 1 : 1.5,
          dash: index < 8 ? undefined : [[8, 4], [2, 3], [8, 3, 2, 3]][(Math.floor(index / 8) - 1) % 3],
          points: { size: 4, ...(each.x.length < 60 ? { show: true } : {}) },
          value: (_plot, value) => show(value, data.unit),
        })),
      ],
      hooks: {
        drawAxes: [drawRestarts],
        setScale: [(drawn, key) => {
          if (key === "x" && charts.get(place) === drawn) zoom([drawn.scales.x.min, drawn.scales.x.max]);
        }],
      },
    }, uPlot.join(tables).map((values, at) => (at ? widenGaps(values) : values)), place);
    plot.setScale("x", { min: view[0], max: view[1] });
    charts.set(place, plot);
    place.dataset.drawn = "";
  };

  const reset = document.getElementById("reset");
  const inner = document.getElementById("zoom");
  const near = (a, b) => Math.abs(a - b) < 1e-6 * page.duration;
  const zoom = (wanted) => {
    const least = Math.max(wanted[0], 0), most = Math.min(wanted[1], page.duration);
    if (!(most - least > page.duration * 1e-6) || (near(least, view[0]) && near(most, view[1]))) return;
    view = [least, most];
    for (const plot of charts.values()) plot.setScale("x", { min: least, max: most });
    if (!inner) return;
    const width = page.duration / (most - least);
    inner.setAttribute("width", `${100 * width}%`);
    inner.setAttribute("x", `${(-100 * least) / (most - least)}%`);
    drawAxis();
    reset.hidden = near(least, 0) && near(most, page.duration);
  };

  const svg = (name, attributes, parent) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent.append(made);
    return made;
  };
  const drawAxis = () => {
    const axis = document.getElementById("axis");
    const length = view[1] - view[0];
    const room = Math.max(Math.floor(axis.getBoundingClientRect().width / 80), 2);
    const step = steps.find((each) => length / each <= room) ?? 604800 * Math.ceil(length / 604800 / room);
    axis.replaceChildren();
    for (let tick = Math.ceil(view[0] / step) * step; tick <= view[1] - length * 0.03; tick += step) {
      const x = `${(100 * (tick - view[0])) / length}%`;
      svg("line", { x1: x, x2: x, y1: 0, y2: 5 }, axis);
      svg("text", { x, y: 16 }, axis).textContent = clock(tick);
    }
  };

  const lanes = document.getElementById("lanes");
  if (lanes) {
    const tip = document.getElementById("tip");
    const texts = new WeakMap();
    const told = (target) => {
      const part = target.closest?.("rect, .mark");
      if (!part || !inner.contains(part)) return "";
      const title = part.querySelector(":scope > title");
      if (title) {
        texts.set(part, title.textContent);
        title.remove(); // or the browser shows its own, a second later
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
      const text = from === null ? told(event.target) : "";
      tip.hidden = !text;
      tip.textContent = text;
      const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
      tip.style.left = `${Math.max(left, 4)}px`;
      tip.style.top = `${event.clientY + 16}px`;
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

  const places = [...document.querySelectorAll("[data-chart]")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting && !charts.has(entry.target)) draw(entry.target);
    }
  }, { rootMargin: "200px" });
  for (const place of places) seen.observe(place);

  const again = (which) => { for (const place of which) draw(place); };
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { again([...charts.keys()]); if (lanes) drawAxis(); }, 150);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again([...charts.keys()]));
  addEventListener("beforeprint", () => { root.classList.add("printing"); again(places); });
  addEventListener("afterprint", () => { root.classList.remove("printing"); again(places); });

  // A link into a closed part opens it.
  const open = () => {
    let target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (const start = target; target; target = target.parentElement) {
      if (target.tagName === "DETAILS") { target.open = true; start.scrollIntoView(); }
    }
  };
  addEventListener("hashchange", open);
  open();
})();
