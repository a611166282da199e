"use strict";

const RETRY_MS = 1000;
const LONG_PROMPT = 60;
const element = (id) => document.getElementById(id);
const storage = { get: () => { try { return localStorage.getItem("voter"); } catch { return null; } },
  set: (name) => { try { localStorage.setItem("voter", name); } catch { /* asked again next time */ } } };
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

let voter = storage.get();
let comparison = null;
let isBusy = false;
let isOver = false;
let timer = null;
let zoomed = 0;

// What the page shows anyway is only read out.
function say(text, isError = false, readOut = "") {
  element("said").textContent = text;
  element("read-out").textContent = readOut;
  element("status").classList.toggle("error", isError);
}

// Asks until the server answers. The same vote again is stored once, so that none is lost or doubled.
async function ask(address, sent) {
  const options = sent === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(sent) };
  for (;;) {
    let answer = null;
    try { answer = await fetch(address, options); } catch { /* not reached */ }
    if (answer !== null && answer.ok) return answer.json();
    if (answer !== null && answer.status < 500) throw new Error((await answer.json().catch(() => ({}))).detail || "Open the address that lightning vote prints now.");
    const why = answer === null ? "The server does not answer." : (await answer.json().catch(() => ({}))).detail || "The server failed.";
    say(`${why} ${address === "vote" ? "The vote is not stored yet. " : ""}Trying again.`, true);
    await pause(RETRY_MS);
  }
}

async function move(address, sent, said) {
  if (isBusy || !voter) return;
  clearTimeout(timer);
  element("zoom").close();
  isBusy = true;
  document.body.setAttribute("aria-busy", "true");
  try {
    await show(await ask(address, sent), said);
  } catch (error) {
    say(error.message, true);
    if (address !== "undo") await ask(next()).then((found) => show(found, error.message, true), () => {});
  }
  document.body.removeAttribute("aria-busy");
  isBusy = false;
  if (comparison === null && !isOver) timer = setTimeout(() => move(next()), RETRY_MS);
}

const next = () => `next?voter=${encodeURIComponent(voter)}`;

async function show(found, said = "", isError = false) {
  const before = comparison;
  comparison = found.comparison;
  const { given, needed } = found.progress;
  element("left").textContent = needed ? `${given} of ${needed} votes` : "No votes needed now";
  element("given").max = needed || 1;
  element("given").value = needed ? given : 0;
  element("ballot").hidden = comparison === null;
  isOver = comparison === null && found.is_over;
  element("over").hidden = !isOver;
  element("waiting").hidden = comparison !== null || isOver;
  if (comparison === null) {
    if (isOver) say("Training has ended.");
    else if (before !== null || said) say(`${said} No images to compare now.`.trim(), isError);
    return;
  }
  element("prompt").textContent = comparison.prompt;
  element("ballot").classList.toggle("long", comparison.prompt.length > LONG_PROMPT);
  element("images").classList.toggle("one-row", comparison.images.length < 3);
  await Promise.all([...element("images").children].map((button, place) => fill(button, comparison.images[place], place)));
  const number = comparison.images.length;
  if (before?.id !== comparison.id || said) {
    say(`${said} ${count(needed - given, "vote")} left.`.trim(), isError, `${comparison.prompt}: ${number} images, keys 1 to ${number}.`);
  }
}

async function fill(button, image, place) {
  button.hidden = image === undefined;
  if (button.hidden) return;
  const picture = button.querySelector("img");
  picture.alt = `Image ${place + 1} of ${comparison.images.length} for: ${comparison.prompt}`;
  picture.src = `image/${image}`;
  await picture.decode().catch(() => {});
  picture.classList.toggle("pixels", picture.naturalWidth < 200);
}

function vote(place) {
  const image = comparison?.images[place];
  if (image !== undefined) move("vote", { voter, comparison: comparison.id, image }, `Image ${place + 1} is stored.`);
}
// The same place on the screen for all images of a comparison, so that details can be compared.
function enlarge(place) {
  const number = comparison?.images.length ?? 0;
  if (!number) return;
  zoomed = (place + number) % number;
  const picture = element("zoom").querySelector("img");
  const { src, alt, className } = element("images").children[zoomed].querySelector("img");
  Object.assign(picture, { src, alt, className });
  element("zoomed").textContent = `Image ${zoomed + 1} of ${number}. A click or the arrow keys show the others; E, or a click beside it, goes back.`;
  element("choose").textContent = `Choose image ${zoomed + 1}`;
  if (!element("zoom").open) {
    element("zoom").showModal();
    element("zoom").focus(); // not the button: the key that opened this may be held
  }
}
const toggle = () => {
  if (element("zoom").open) element("zoom").close();
  else enlarge(Math.max(0, [...element("images").children].findIndex((button) => button.matches(":hover, :focus"))));
};

const skip = () => { if (comparison) move("vote", { voter, comparison: comparison.id, image: null }, "Skipped."); };
const undo = () => move("undo", { voter }, "The last vote is undone.");

function start() {
  element("who").hidden = Boolean(voter);
  element("self").hidden = !voter;
  element("own").textContent = voter;
  if (voter) move(next());
  else {
    comparison = null;
    element("ballot").hidden = element("waiting").hidden = element("over").hidden = true;
    element("voter").focus();
  }
}

for (let place = 0; place < 4; place += 1) {
  const button = document.createElement("button");
  const key = document.createElement("kbd");
  key.textContent = String(place + 1);
  key.setAttribute("aria-hidden", "true");
  button.append(document.createElement("img"), key);
  button.addEventListener("click", () => vote(place));
  element("images").append(button);
}
element("enlarge").addEventListener("click", toggle);
element("zoom").addEventListener("click", (event) => (event.target.matches("img") ? enlarge(zoomed + 1) : element("zoom").close()));
element("choose").addEventListener("click", () => vote(zoomed));
element("skip").addEventListener("click", skip);
element("undo").addEventListener("click", undo);
element("undo-last").addEventListener("click", undo);
element("rename").addEventListener("click", () => { element("voter").value = voter; voter = null; start(); });
element("who").addEventListener("submit", (event) => {
  event.preventDefault();
  voter = element("voter").value.trim() || null;
  if (voter) storage.set(voter);
  start();
});
// A double click or a held key would judge images that nobody has seen yet.
addEventListener("click", (event) => {
  if (event.detail > 1 && event.target.closest("#images, #choose, #skip")) event.stopPropagation();
}, true);
addEventListener("keydown", (event) => {
  if (event.repeat && event.key === "Enter") event.preventDefault();
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
  const key = event.key.toLowerCase();
  if (/^[1-4]$/.test(key)) vote(Number(key) - 1);
  else if (key === "e") toggle();
  else if (element("zoom").open && /^arrow(left|right)$/.test(key)) enlarge(zoomed + (key === "arrowleft" ? -1 : 1));
  else if (key === "s") skip();
  else if (key === "u" || key === "z") undo();
});
start();
