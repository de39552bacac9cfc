// Shared by the timeline and the charts: the range in view, the format of times and values, and the tooltip.
// All text is inserted as text, never as markup. The files are joined into one script; other scripts cannot access it.
const root = document.documentElement;
const page = JSON.parse(document.getElementById("page").textContent);
const full = [0, page.duration];
let view = full;
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

// The horizontal axis has times, or the numbers of steps.
const ofSteps = page.axis === "steps";
const position = (at) => (ofSteps ? String(Math.round(at)) : clock(at));
const positionStep = (length, most) => (ofSteps ? Math.max(valueStep(length, ""), 1) : timeStep(length, most));

const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

const steps = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const timeStep = (length, most) =>
  steps.find((each) => length / each <= most) ?? 604800 * Math.ceil(length / 604800 / most);
const valueStep = (length, unit) => {
  if (unit.startsWith("B")) return 2 ** Math.max(Math.ceil(Math.log2(length / 8)), 0);
  const power = 10 ** Math.floor(Math.log10(length / 6));
  return power * [1, 2, 5, 10].find((each) => power * each >= length / 6);
};
const ticks = ([least, most], step, render) => {
  const at = [];
  for (let number = Math.ceil(least / step); number * step <= most && at.length < 50; number += 1) at.push(number * step);
  return { tickmode: "array", tickvals: at, ticktext: at.map(render) };
};

const svg = (name, attributes, parent) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
};
const tip = document.getElementById("tip");
const placeTip = (event) => {
  const left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
  const isLow = event.clientY + 16 + tip.offsetHeight > innerHeight;
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(isLow ? event.clientY - tip.offsetHeight - 12 : event.clientY + 16, 4)}px`;
};
