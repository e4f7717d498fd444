// Charts by uPlot, and the two maps on canvases. Nothing here knows about the network.
"use strict";

const SHOWN_KINDS = ["accepted", "rejected", "stale", "too_soon", "garbage", "failed"];
const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const kindColor = kind => color(SHOWN_KINDS.includes(kind) ? kind : "other");
const plain = kind => kind.replace("_", " ");
const isNumber = x => typeof x === "number";

function short(x, digits = 3) {
  if (!isNumber(x)) return "-";
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return String(x);
  return Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(1) : String(Number(x.toPrecision(digits)));
}

function clock(at) {
  return isNumber(at) ? new Date(at * 1000).toLocaleTimeString("en-GB") : "-";
}

function tick(at, step) {
  if (step >= 43200) return new Date(at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return step >= 60 ? clock(at).slice(0, 5) : clock(at);
}

// Charts: a table of what each shows. series(state) -> [[label, color name, values], ..], x from the state.
const CHARTS = {
  error: state => ({ x: state.errors.at, lines: [["test error", "link", state.errors.error]] }),
  rates: state => ({
    x: state.series.at,
    lines: Object.entries(state.series.rates).map(([kind, values]) => [plain(kind), kind, values]),
  }),
  staleness: state => ({
    x: state.series.at,
    lines: [["mean", "link", state.series.staleness], ["oldest", "other", state.series.oldest]],
  }),
  threshold: state => ({ x: state.series.at, lines: [["largest factor accepted", "link", state.series.threshold]] }),
  states: state => ({
    x: state.series.at,
    lines: [["left out", "bad", state.series["left out"]], ["on probation", "stale", state.series["on probation"]],
      ["expired", "other", state.series.expired]],
  }),
};
const HEIGHT = 160;  // pixels of a chart without its legend
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 2592000, 31536000];
const charts = {};  // id -> {plot, labels}

function drawChart(id, state) {
  const box = document.getElementById(id), { x, lines } = CHARTS[id](state);
  const labels = lines.map(line => line[0]).join();
  const data = [x, ...lines.map(line => line[2])];
  if (!charts[id] || charts[id].labels !== labels) {
    if (charts[id]) charts[id].plot.destroy();
    charts[id] = { plot: makeChart(box, lines, data), labels };
  } else {
    charts[id].plot.setData(data);
  }
}

function makeChart(box, lines, data) {
  const axis = { stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") } };
  const font = "11px system-ui, sans-serif";
  return new uPlot({
    width: Math.max(200, box.clientWidth), height: HEIGHT,
    cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (plot, low, high) => isNumber(high) ? [Math.min(0, low), high > 0 ? high * 1.08 : 1] : [0, 1] } },
    axes: [
      { ...axis, font, size: 28, space: 64, incrs: STEPS, values: (plot, splits, i, space, step) => splits.map(at => tick(at, step)) },
      { ...axis, font, size: 46, space: 26, values: (plot, splits) => splits.map(x => short(x)) },
    ],
    series: [
      { value: (plot, at) => isNumber(at) ? clock(at) : "--" },
      ...lines.map(([label, name]) => ({
        label, stroke: color(name), width: 1.5, spanGaps: true, value: (plot, x) => short(x),
        points: { show: data[0].length < 40, size: 4 },
      })),
    ],
  }, data, box);
}

function resizeCharts() {
  for (const [id, { plot }] of Object.entries(charts)) {
    const width = Math.max(200, document.getElementById(id).clientWidth);
    if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
}

function forgetCharts() {
  for (const id of Object.keys(charts)) {
    charts[id].plot.destroy();
    delete charts[id];
  }
}

// A canvas of this height in CSS pixels, sharp on any screen.
function prepared(canvas, height) {
  const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  return { context, width, height };
}

// Timeline: time x client. Accepted uploads are drawn first, so that no other verdict hides below them.
const MARGIN = { left: 40, right: 8, top: 6, bottom: 18 };

function timelineScale(width, height, dots) {
  const from = Math.min(...dots.at.slice(0, 50)), to = Math.max(...dots.at.slice(-50), from + 1);
  const most = Math.max(1, dots.most);
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  return {
    from, to, most,
    x: at => MARGIN.left + (at - from) / (to - from) * inner.width,
    y: client => MARGIN.top + (1 - (client + 0.5) / (most + 1)) * inner.height,
    client: y => Math.round((1 - (y - MARGIN.top) / inner.height) * (most + 1) - 0.5),
    row: inner.height / (most + 1),
  };
}

function drawTimeline(canvas, dots, kinds) {
  const { context, width, height } = prepared(canvas, canvas.clientWidth > 600 ? 380 : 280);
  if (!dots.at.length) return null;
  const scale = timelineScale(width, height, dots);
  context.strokeStyle = color("line");
  context.strokeRect(MARGIN.left + 0.5, MARGIN.top + 0.5, width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom);
  context.fillStyle = color("faint");
  context.textAlign = "right";
  for (const client of new Set([0, Math.round(scale.most / 2), scale.most])) {
    context.fillText(String(client), MARGIN.left - 6, Math.min(height - MARGIN.bottom, scale.y(client) + 4));
  }
  for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
    context.textAlign = align;
    const at = scale.from + share * (scale.to - scale.from);
    context.fillText(clock(at), scale.x(at), height - 4);
  }
  const tall = Math.max(2, Math.min(9, scale.row - 1)), accepted = kinds.indexOf("accepted");
  for (const pass of [true, false]) {
    context.globalAlpha = pass ? 0.45 : 1;
    for (let code = 0; code < kinds.length; code++) {
      if ((code === accepted) !== pass) continue;
      context.fillStyle = kindColor(kinds[code]);
      for (let i = 0; i < dots.at.length; i++) {
        if (dots.kind[i] === code) context.fillRect(scale.x(dots.at[i]) - 1, scale.y(dots.client[i]) - tall / 2, 2.5, tall);
      }
    }
  }
  context.globalAlpha = 1;
  return scale;
}

// Heat map: red pulls together, blue pulls apart, the background's color is unrelated.
function drawHeat(canvas, heat) {
  const count = heat.clients.length, margin = count <= 30 ? 30 : 8;
  const size = Math.min(canvas.clientWidth, 380);
  const { context } = prepared(canvas, size);
  const cell = (size - margin - 2) / count, [plus, minus] = [color("plus"), color("minus")];
  for (let i = 0; i < count; i++) {
    for (let j = 0; j < count; j++) {
      const x = heat.cosines[i][j];
      context.fillStyle = x === null ? color("page") : `rgb(${x > 0 ? plus : minus} / ${Math.abs(x)})`;
      context.fillRect(margin + j * cell, margin + i * cell, Math.max(1, cell - 0.5), Math.max(1, cell - 0.5));
    }
  }
  const out = heat.states.filter(state => state === "left out").length;
  if (out) {  // they come first
    context.strokeStyle = color("text");
    context.lineWidth = 2;
    context.strokeRect(margin - 1, margin - 1, out * cell + 1.5, out * cell + 1.5);
  }
  if (margin === 30) {
    context.textBaseline = "middle";
    heat.clients.forEach((client, i) => {
      context.fillStyle = color(heat.states[i] === "left out" ? "bad" : "faint");
      context.textAlign = "right";
      context.fillText(String(client), margin - 5, margin + (i + 0.5) * cell);
      context.textAlign = "center";
      if (cell > 14 || i % 2 === 0) context.fillText(String(client), margin + (i + 0.5) * cell, margin - 10);
    });
  }
  return { cell, margin };
}

// Factors of one client over its last uploads, on a logarithmic scale.
function drawFactors(canvas, history) {
  const known = history.filter(entry => isNumber(entry.factor) && entry.factor > 0).reverse();
  canvas.hidden = known.length < 2;
  if (canvas.hidden) return;
  const { context, width, height } = prepared(canvas, 110);
  const logs = known.map(entry => Math.log10(entry.factor));
  const low = Math.min(...logs), high = Math.max(...logs, low + 0.1);
  known.forEach((entry, i) => {
    context.fillStyle = kindColor(entry.kind);
    const x = 54 + i / Math.max(1, known.length - 1) * (width - 64), y = 8 + (high - logs[i]) / (high - low) * (height - 24);
    context.fillRect(x - 2, y - 2, 4, 4);
  });
  context.fillStyle = color("faint");
  context.fillText(short(10 ** high), 4, 12);
  context.fillText(short(10 ** low), 4, height - 12);
  canvas.setAttribute("aria-label", `factors of the last ${known.length} uploads, from ${short(10 ** low)} to ${short(10 ** high)}`);
}
