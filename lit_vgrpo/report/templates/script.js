"use strict";
document.documentElement.classList.add("js");

const remember = (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* a file may have no storage */ } };
const recall = (key) => { try { return sessionStorage.getItem(key); } catch { return null; } };

for (const radio of document.querySelectorAll(".axes input")) {
  radio.addEventListener("change", () => remember("axis", radio.value));
  if (recall("axis") === radio.value) radio.checked = true;
}

const enlarged = document.createElement("dialog");
enlarged.addEventListener("click", () => enlarged.close());
document.body.append(enlarged);
for (const image of document.querySelectorAll(".cards img")) {
  const enlarge = () => {
    const group = image.closest(".pair") ?? image;
    enlarged.replaceChildren(group.cloneNode(true), image.closest("li").querySelector(".prompt").cloneNode(true));
    for (const copy of enlarged.querySelectorAll("img")) copy.removeAttribute("tabindex");
    enlarged.showModal();
  };
  image.tabIndex = 0;
  image.setAttribute("role", "button");
  image.addEventListener("click", enlarge);
  image.addEventListener("keydown", (event) => { if (event.key === "Enter") enlarge(); });
}

for (const code of document.querySelectorAll("code.command, pre > code")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    const text = document.createElement("textarea");  // a file has no navigator.clipboard in every browser
    text.value = code.textContent;
    document.body.append(text);
    text.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Select it and press Ctrl-C";
    text.remove();
  });
  (code.closest("pre") ?? code).after(button);
}

const hint = document.createElement("output");
hint.className = "hint";
document.body.append(hint);
const short = (value) => String(Number(value.toPrecision(4)));
for (const svg of document.querySelectorAll(".drawing svg")) {
  const [left, perX] = svg.dataset.x.split(" ").map(Number);
  const [bottom, perY] = svg.dataset.y.split(" ").map(Number);
  const curves = [...svg.querySelectorAll("[data-curve]")].map((curve) => {
    const numbers = curve.querySelector("path").getAttribute("d").match(/-?[\d.]+(?:e-?\d+)?/g).map(Number);
    return { label: curve.dataset.curve, xs: numbers.filter((_, n) => n % 2 === 0), ys: numbers.filter((_, n) => n % 2) };
  });
  svg.addEventListener("pointermove", (event) => {
    const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const lines = curves.map(({ label, xs, ys }) => {
      const nearest = xs.reduce((best, x, n) => (Math.abs(x - place.x) < Math.abs(xs[best] - place.x) ? n : best), 0);
      return `${label} ${short((bottom - ys[nearest]) / -perY)} at ${short((xs[nearest] - left) / perX)}`;
    });
    hint.textContent = lines.join("\n");
    hint.style.left = `${Math.min(event.pageX + 14, window.innerWidth - hint.offsetWidth - 8)}px`;
    hint.style.top = `${event.pageY + 14}px`;
    hint.hidden = false;
  });
  svg.addEventListener("pointerleave", () => { hint.hidden = true; });
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
