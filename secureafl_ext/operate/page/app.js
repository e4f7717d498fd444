// Polls the server and fills the page. Text that a client may have chosen is only ever set as textContent.
"use strict";

const POLL = 1000, SLOWEST_POLL = 30000, HEAT_POLL = 5000;  // milliseconds
const ROWS = 50, MOST_DOTS = 4000, MOST_NAMED = 60;
const get = id => document.getElementById(id);
const page = {
  state: null, asked: "", start: 0, delay: POLL, heard: null, heat: null, heatAt: -HEAT_POLL, heatShape: null,
  dots: null, scale: null, client: null, timer: 0, busy: false, again: false,
};
window.secureafl = page;  // for the browser's console, and for tests

function make(tag, text = "", className = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

const label = row => row.name ? `${row.client}: ${row.name}` : `client ${row.client}`;
const percent = x => isNumber(x) ? `${Math.round(100 * x)} %` : "-";

// The network

async function fetched(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10000) })
    .catch(() => { throw new Error("the server is gone"); });
  if (answer.status === 204) return null;
  if (answer.status === 401) throw new Error("a token is needed: open this address with /?token=TOKEN once");
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

async function poll() {
  clearTimeout(page.timer);
  page.again = page.busy;  // the reader wants other rows than those on their way
  if (page.busy) return;
  page.busy = true;
  try {
    const wanted = new URLSearchParams({ start: page.start, count: ROWS, search: get("search").value });
    const isSame = page.asked === wanted.toString();
    const since = page.state && isSame ? page.state.since : "";
    const state = await fetched(`state.json?${wanted}&since=${encodeURIComponent(since)}`);
    page.asked = wanted.toString();
    page.heard = Date.now();
    page.delay = POLL;
    if (state) await show(state, since !== "");
    if (performance.now() - page.heatAt >= HEAT_POLL && page.state) await pollHeat();
    showStatus(null);
  } catch (error) {
    page.delay = Math.min(SLOWEST_POLL, 2 * page.delay);
    showStatus(error);
  }
  page.busy = false;
  page.timer = setTimeout(poll, page.again ? 0 : page.delay);
}

async function pollHeat() {
  page.heatAt = performance.now();
  page.heat = await fetched("similarity.json");
  showHeat();
}

function showStatus(error) {
  const status = get("status"), state = page.state;
  status.className = error ? "gone" : "live";
  if (error) {
    const last = page.heard ? `, last heard at ${clock(page.heard / 1000)}` : "";
    status.textContent = `${error.message}${last}; next try in ${Math.round(page.delay / 1000)} s`;
  } else if (state && state.ended) {
    status.className = "";
    status.textContent = "ended";
  } else {
    const ago = state && isNumber(state.at) ? Math.max(0, Math.round(Date.now() / 1000 - state.at)) : null;
    status.textContent = ago === null ? "live, nothing has come yet" : ago < 5 ? "live" : `live, last news ${duration(ago)} ago`;
  }
}

function bytes(count) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${short(count / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

function duration(seconds) {
  if (seconds < 120) return `${seconds} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

// The page

async function show(state, isMore) {
  const restarted = page.state && page.state.id !== state.id;
  page.state = state;
  get("title").textContent = state.title;
  addDots(state.timeline, isMore && !restarted);
  showNotes(state);
  showTiles(state);
  showQueue(state.queue);
  showNamed(state);
  showCharts(state);
  showTimeline();
  showRows(state.clients);
  if (page.client !== null && get("detail").open) await showClient(page.client);
}

function showNotes(state) {
  const notes = [];
  if (state.dropped) notes.push(`${state.dropped} verdicts are missing: the observers were too slow.`);
  if (state.damaged) notes.push(`${state.damaged} entries could not be read.`);
  get("notes").hidden = notes.length === 0;
  get("notes").textContent = notes.join(" ");
}

function showTiles(state) {
  const last = state.errors.error.at(-1), states = state.states;
  const refused = (state.totals.rejected || 0) + (state.totals.garbage || 0);
  const tiles = [
    ["version", state.version], ["uploads / s", short(state.rate, 2)], ["accepted", state.totals.accepted || 0],
    ["rejected", refused], ["clients", state.clients.total], ["left out", state.weighs === false ? null : states["left out"], "bad"],
    ["on probation", states["on probation"]], ["expired or left", states.expired + states.left],
    ["threshold", isNumber(state.threshold) ? short(state.threshold) : null], ["test error", isNumber(last) ? short(last) : null],
  ];
  fillTiles("tiles", tiles.filter(([, value]) => value !== null));
}

function showQueue(queue) {
  get("queue-box").hidden = !queue;
  if (!queue) return;
  fillTiles("queue", [
    ["messages without a reply", queue.open], ["replies that wait", queue.waiting],
    ["longest wait", duration(Math.round(10 * queue.longest_wait) / 10)], ["memory of replies", bytes(queue.waiting_bytes)],
    ["free places", Math.max(0, queue.places - queue.open - queue.waiting)],
    ["nodes to ask", queue.to_ask], ["nodes that pause after a failure", queue.paused],
  ]);
}

function fillTiles(id, tiles) {
  get(id).replaceChildren(...tiles.map(([name, value, className]) => {
    const box = make("div", "", className && value ? className : "");
    box.append(make("dt", name), make("dd", isNumber(value) ? value.toLocaleString("en") : value));
    return box;
  }));
}

function showNamed(state) {
  const nobody = "Nobody so far. A client is named when, over several looks, the rule gives it almost no weight, or its updates point against those of the others or have no direction in common; or when its uploads are refused far more often than others'.";
  get("nobody").textContent = state.named.length ? "" : nobody;
  get("nobody").hidden = state.named.length > 0;
  const sorted = [...state.named.filter(moment => moment.now), ...state.named.filter(moment => !moment.now)];
  get("named").replaceChildren(...sorted.slice(0, MOST_NAMED).map(moment => {
    const item = make("li", "", moment.now ? "" : "past"), button = make("button");
    const now = moment.now ? "" : "; not now";
    button.append(make("b", label(moment)), make("span", ` at ${clock(moment.at)}, version ${moment.version}: ${moment.why}${now}`));
    button.addEventListener("click", () => openClient(moment.client));
    item.append(button);
    return item;
  }));
}

function showCharts(state) {
  const some = values => values.some(isNumber);
  get("error-box").hidden = !some(state.errors.error);
  get("threshold-box").hidden = !some(state.series.threshold);
  get("states-box").hidden = !some(state.series["left out"]);
  for (const id of Object.keys(CHARTS)) {
    if (!get(id).parentElement.hidden) drawChart(id, state);
  }
}

function addDots(more, isMore) {
  const names = ["at", "client", "kind"], old = page.dots;
  page.dots = Object.fromEntries(names.map(name => [name, (isMore && old ? old[name].concat(more[name]) : more[name]).slice(-MOST_DOTS)]));
  page.dots.most = page.dots.client.reduce((most, client) => Math.max(most, client), 0);
}

function showTimeline() {
  const { dots, state } = page, canvas = get("timeline");
  page.scale = drawTimeline(canvas, dots, state.kinds);
  const present = state.kinds.filter((kind, code) => dots.kind.includes(code));
  canvas.setAttribute("aria-label", `the last ${dots.at.length} verdicts of all clients over time`);
  get("legend").replaceChildren(...present.map(kind => {
    const item = make("li", plain(kind));
    item.style.setProperty("--dot", kindColor(kind));
    return item;
  }));
}

function showHeat() {
  const heat = page.heat;
  get("heat-box").hidden = !heat || heat.clients.length < 2;
  if (get("heat-box").hidden) return;
  page.heatShape = drawHeat(get("heat"), heat);
  const out = heat.clients.filter((client, i) => heat.states[i] === "left out");
  get("heat").setAttribute("aria-label", `cosines between ${heat.clients.length} clients; left out: ${out.join(", ") || "none"}`);
}

function showRows(clients) {
  const cells = row => {
    const known = (row.counts.accepted || 0) + (row.counts.rejected || 0);
    const all = Object.values(row.counts).reduce((sum, count) => sum + count, 0);
    return [row.counts.accepted || 0, row.counts.rejected || 0, all - known, short(row.staleness), short(row.factor),
      short(row.weight, 2), short(row.with_others, 2), percent(row.left_out)];
  };
  get("rows").replaceChildren(...clients.rows.map(row => {
    const line = make("tr", "", row.reason || row.state === "left out" ? "out" : ""), first = make("td"), who = make("button", label(row), "who");
    who.title = label(row);
    first.append(who);
    line.append(first, make("td", row.state, "state"), ...cells(row).map(value => make("td", String(value), "number")));
    line.append(make("td", row.named_at === null ? "" : `${clock(row.named_at)}, version ${row.named_version}`));
    line.addEventListener("click", () => openClient(row.client));
    return line;
  }));
  const last = clients.start + clients.rows.length;
  get("place").textContent = clients.found ? `${clients.start + 1} to ${last} of ${clients.found}` : "none";
  get("before").disabled = clients.start === 0;
  get("next").disabled = last >= clients.found;
}

// One client

function openClient(client) {
  page.client = client;
  showClient(client).then(() => get("detail").open || get("detail").showModal()).then(() => showClient(client)).catch(showStatus);
}

async function showClient(client) {
  const found = await fetched(`client/${client}.json`);
  if (page.client !== client) return;
  if (found.gone) {
    get("detail-name").textContent = `client ${client}`;
    get("detail-facts").textContent = "nothing is known of it any more";
    get("history").replaceChildren();
    return;
  }
  get("detail-name").textContent = label(found);
  const named = found.named_at === null ? "never named" : `named at ${clock(found.named_at)}, version ${found.named_version}`;
  const counts = Object.entries(found.counts).map(([kind, count]) => `${count} ${plain(kind)}`).join(", ");
  get("detail-facts").textContent =
    `${found.state}; ${named}; ${found.reason ? `${found.reason}; ` : ""}left out in ${percent(found.left_out)} of the looks; weight ${short(found.weight)}; cosine with the others ${short(found.with_others, 2)}; ${counts}`;
  if (get("detail").open) drawFactors(get("detail-factors"), found.history);
  get("history").replaceChildren(...found.history.map(entry => {
    const line = make("tr");
    line.append(make("td", clock(entry.at)), make("td", plain(entry.kind), `is-${entry.kind}`));
    for (const name of ["version", "staleness", "factor"]) line.append(make("td", short(entry[name]), "number"));
    line.append(make("td", entry.reason, "reason"));
    return line;
  }));
}

// What the reader does

function redraw() {
  if (!page.state) return;
  forgetCharts();
  showCharts(page.state);
  showTimeline();
  showHeat();
}

function turn(by) {
  page.start = Math.max(0, page.start + by);
  poll();
}

get("before").addEventListener("click", () => turn(-ROWS));
get("next").addEventListener("click", () => turn(ROWS));
get("search").addEventListener("input", () => { page.start = 0; poll(); });
get("close").addEventListener("click", () => get("detail").close());
get("detail").addEventListener("close", () => { page.client = null; });
get("timeline").addEventListener("click", event => {
  const client = page.scale && page.scale.client(event.offsetY);
  if (page.dots && page.dots.client.includes(client)) openClient(client);
});
get("heat").addEventListener("mousemove", event => {
  const { cell, margin } = page.heatShape, heat = page.heat;
  const [j, i] = [event.offsetX, event.offsetY].map(x => Math.floor((x - margin) / cell));
  const name = k => label({ client: heat.clients[k], name: heat.names[k] });
  const isCell = heat.clients[i] !== undefined && heat.clients[j] !== undefined;
  get("heat-text").textContent = isCell ? `${name(i)} and ${name(j)}: ${short(heat.cosines[i][j])}` : "Point at a cell.";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(() => { if (page.state) { resizeCharts(); showTimeline(); showHeat(); } }).observe(document.body);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
