"use strict";
document.documentElement.classList.add("js");

const remember = (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* a file may have no storage */ } };
const recall = (key) => { try { return sessionStorage.getItem(key); } catch { return null; } };

for (const radio of document.querySelectorAll("input[name=axis]")) {
  radio.addEventListener("change", () => remember("axis", radio.value));
  if (recall("axis") === radio.value) radio.checked = true;
}

for (const stages of document.querySelectorAll(".stages")) {
  const slider = stages.querySelector("input[type=range]");
  const stops = [...stages.querySelectorAll("button")];
  const show = () => {
    const at = Number(slider.value);
    const nearest = Math.round(at);
    for (const stack of stages.querySelectorAll(".stack")) {
      [...stack.querySelectorAll("img")].forEach((image, number) => {
        // The image below stays opaque, so that two stages blend without showing the page between them.
        const above = number > at ? Math.max(0, 1 - (number - at)) : 1;
        image.style.opacity = number < Math.floor(at) ? 0 : above;
        image.setAttribute("aria-hidden", String(number !== nearest));
      });
    }
    stops.forEach((stop, number) => stop.setAttribute("aria-pressed", String(number === at)));
    slider.setAttribute("aria-valuetext", stops[nearest].textContent);
    remember(slider.id, slider.value);
  };
  slider.addEventListener("input", show);
  stops.forEach((stop, number) => stop.addEventListener("click", () => { slider.value = number; show(); }));
  const before = recall(slider.id);
  if (before !== null && document.body.hasAttribute("data-live") && Number(before) < stops.length) slider.value = before;
  show();
}

if (document.body.hasAttribute("data-live")) {
  let version = null;
  setInterval(async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      const now = await answer.text();
      if (version !== null && now !== version) location.reload();
      version = now;
    } catch { /* the server has stopped: the page stays as it is */ }
  }, 3000);
}
