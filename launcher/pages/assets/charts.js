// Draws the curves when they come into view. Needs values.js, and `zoom` from report.js.
const charts = new Map();

const decode = (series) => {
  let now = 0;
  return [series.x.map((step) => (now += step) / 1000), series.y];
};

const rangeOfValues = (chart) => {
  let least = Infinity, most = -Infinity;
  chart.tables.forEach(([times, values], index) => {
    if (chart.hidden.has(index)) return;
    values.forEach((value, at) => {
      // A curve that only crosses the view has a point on each side of it.
      const isSeen = (times[at + 1] ?? times[at]) >= view[0] && (times[at - 1] ?? times[at]) <= view[1];
      if (value !== null && isSeen) [least, most] = [Math.min(least, value), Math.max(most, value)];
    });
  });
  if (least > most) return [0, 1];
  if (chart.unit && least >= 0) return [0, most > 0 ? most * 1.08 : 1];
  const pad = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
  return [least - pad, most + pad];
};

const dashes = ["solid", "dash", "dot", "dashdot"];
const margin = { l: 68, r: 12, t: 6, b: 22 };
const coarse = matchMedia("(pointer: coarse)");

// plotly.js takes most of a second to start, so it starts with the first curve that comes into view.
const begin = () => {
  if (window.Plotly) return;
  const script = document.createElement("script");
  script.textContent = document.getElementById("plotly").textContent;
  document.head.append(script);
};

const read = (place) => {
  const { unit, series, marks } = JSON.parse(document.getElementById(`data-${place.dataset.chart}`).textContent);
  const drawing = document.createElement("div"), cursor = document.createElement("i"), legend = document.createElement("ul");
  cursor.className = "cursor";
  cursor.hidden = true;
  legend.className = "legend";
  place.append(drawing, cursor, legend);
  const chart = { drawing, cursor, unit, series, marks, tables: series.map(decode), hidden: new Set() };
  series.forEach(({ label }, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(swatch(index), label);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!chart.hidden.delete(index)) chart.hidden.add(index);
      button.setAttribute("aria-pressed", String(!chart.hidden.has(index)));
      draw(place);
    });
    const item = document.createElement("li");
    item.append(button);
    legend.append(item);
  });
  charts.set(place, chart);
  return chart;
};

const draw = (place) => {
  begin();
  const isNew = !charts.has(place);
  const chart = charts.get(place) ?? read(place);
  const { drawing, unit, series, marks, tables } = chart;
  const width = Math.max(Math.floor(place.getBoundingClientRect().width), 200);
  const line = colour("--line"), values = rangeOfValues(chart);
  const axis = { gridcolor: line, linecolor: line, zeroline: false };
  const lines = [...page.restarts.map((time) => ["restart", time]), ...(marks ?? [])];
  const shown = lines.filter(([, at]) => at >= view[0] && at <= view[1]);
  const traces = tables.map(([x, y], index) => ({
    x,
    y,
    type: "scatter",
    mode: x.length < 60 ? "lines+markers" : "lines",
    line: { color: colour(`--c${index % 8}`), width: series[index].wide ? 5 : series.length > 4 ? 1 : 1.5, dash: dashes[Math.floor(index / 8) % 4] },
    marker: { size: 4 },
    opacity: series[index].wide ? 0.5 : 1,
    fill: series[index].fills ? "tonexty" : "none",
    visible: !chart.hidden.has(index),
    hoverinfo: "none", // curve names come from others, and Plotly would read them as markup
  }));
  const layout = {
    width,
    height: 220,
    margin,
    paper_bgcolor: colour("--back"),
    plot_bgcolor: colour("--back"),
    font: { family: "system-ui, sans-serif", size: 11, color: colour("--dim") },
    showlegend: false,
    hovermode: "x",
    hoverdistance: -1,
    dragmode: coarse.matches ? false : "zoom", // a finger scrolls the page
    xaxis: { ...axis, range: [...view], ...ticks(view, positionStep(view[1] - view[0], width / 80), position) },
    yaxis: {
      ...axis,
      range: values,
      fixedrange: true,
      ...ticks(values, valueStep(values[1] - values[0], unit), (value) => show(value, unit)),
    },
    shapes: (shown.length > 30 ? [] : shown).map(([kind, at]) => ({
      type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", layer: "below",
      line: { color: colour(`--${kind}`), width: 1, dash: "dash" },
    })),
  };
  const config = { displayModeBar: false, displaylogo: false, showTips: false, doubleClick: false, plotlyServerURL: "" };
  Plotly.react(drawing, traces, layout, config);
  stale.delete(place);
  place.dataset.drawn = "";
  if (!isNew) return;
  drawing.on("plotly_relayout", (change) => {
    if ("xaxis.range[0]" in change) zoom([change["xaxis.range[0]"], change["xaxis.range[1]"]]);
  });
  drawing.on("plotly_doubleclick", () => zoom(full));
  drawing.on("plotly_hover", (hovered) => tell(chart, hovered));
  drawing.on("plotly_unhover", untell);
};

// Charts out of view are redrawn when they come into view.
const seen = new Set(), stale = new Set();
const redraw = () => {
  for (const place of charts.keys()) {
    if (seen.has(place)) draw(place);
    else stale.add(place);
  }
};

const swatch = (index) => {
  const made = svg("svg", { width: 16, height: 8, "aria-hidden": "true" });
  const dash = ["", "5 3", "2 2", "5 2 2 2"][Math.floor(index / 8) % 4];
  svg("line", { x1: 0, x2: 16, y1: 4, y2: 4, class: `c${index % 8}`, "stroke-dasharray": dash }, made);
  return made;
};

// Marks the moment under the pointer in all charts.
const point = (time) => {
  for (const place of seen) {
    const chart = charts.get(place);
    if (!chart) continue;
    chart.cursor.hidden = time === null || time < view[0] || time > view[1];
    const width = chart.drawing.getBoundingClientRect().width - margin.l - margin.r;
    chart.cursor.style.left = `${margin.l + (width * (time - view[0])) / (view[1] - view[0])}px`;
  }
};
const tell = (chart, { points, xvals, yvals, event }) => {
  const time = xvals?.[0] ?? points[0].x;
  const found = points.map(({ curveNumber, y }) => ({ index: curveNumber, y })).sort((a, b) => b.y - a.y);
  const away = ({ y }) => Math.abs(y - (yvals?.[0] ?? y));
  const near = found.reduce((best, each) => (away(each) < away(best) ? each : best));
  const first = Math.max(Math.min(found.indexOf(near) - 5, found.length - 12), 0);
  tip.replaceChildren(ofSteps ? `step ${position(time)}` : position(time));
  for (const each of found.slice(first, first + 12)) {
    const row = document.createElement("div");
    if (each === near && found.length > 1) row.className = "near";
    row.append(swatch(each.index), `${show(each.y, chart.unit)} ${chart.series[each.index].label}`);
    tip.append(row);
  }
  if (found.length > 12) tip.append(`${found.length - 12} more`);
  tip.hidden = false;
  placeTip(event);
  point(time);
};

const untell = () => {
  tip.hidden = true;
  point(null);
};

const places = [...document.querySelectorAll("[data-chart]")];
const watching = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) seen.add(target);
    else seen.delete(target);
    if (isIntersecting && (!charts.has(target) || stale.has(target))) draw(target);
  }
}, { rootMargin: "200px" });
for (const place of places) watching.observe(place);
