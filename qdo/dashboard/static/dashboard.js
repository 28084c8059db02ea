// Keeps an open page up to date. Every page works without it.
"use strict";
(() => {
  const POLL_MS = 2000;
  const body = document.body;
  const connection = document.getElementById("connection");
  let known = body.dataset.reading;
  let looking = false;

  const say = (text) => {
    if (connection && connection.textContent !== text) connection.textContent = text;
  };

  // A part in which somebody types, selects or chooses stays as it is.
  const isInUse = (part) => {
    const focus = document.activeElement;
    if (part.contains(focus) && focus.matches("input, select, textarea")) return true;
    if (part.querySelector("input:checked")) return true;
    const chosen = document.getSelection();
    return Boolean(chosen && !chosen.isCollapsed && part.contains(chosen.anchorNode));
  };

  const focusPath = (part) => {
    const focus = document.activeElement;
    if (!part.contains(focus)) return null;
    const all = [...part.querySelectorAll("a, button, pre")];
    return { href: focus.getAttribute("href"), place: all.indexOf(focus) };
  };

  const restoreFocus = (part, path) => {
    if (!path) return;
    const all = [...part.querySelectorAll("a, button, pre")];
    const same = path.href && all.find((each) => each.getAttribute("href") === path.href);
    const found = same || all[path.place];
    if (found) found.focus({ preventScroll: true });
  };

  const show = (fresh) => {
    for (const part of document.querySelectorAll("[data-live]")) {
      const next = fresh.getElementById(part.id);
      if (!next || isInUse(part) || part.innerHTML === next.innerHTML) continue;
      const path = focusPath(part);
      part.replaceChildren(...next.childNodes);
      prepare(part);
      restoreFocus(part, path);
    }
    tick();
  };

  const refresh = async () => {
    const answer = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
    if (answer.redirected) {
      location.reload();  // the session has ended
    } else if (answer.ok || answer.status === 404) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (document.querySelector('meta[http-equiv="refresh"]')) location.reload();
      else show(fresh);
    }
  };

  // Looks whether there is a newer reading than the one on the page.
  const look = async () => {
    if (document.hidden || looking) return;
    looking = true;
    try {
      const answer = await fetch(body.dataset.poll, { credentials: "same-origin", cache: "no-store" });
      if (answer.status === 401) location.reload();  // the session has ended
      if (!answer.ok) throw new Error(answer.statusText);
      const newest = await answer.text();
      if (newest !== known) {
        await refresh();
        known = newest;
      }
      say("");
    } catch (error) {
      say("not connected, trying again");
    } finally {
      looking = false;
    }
  };

  const tick = () => {
    const now = Date.now() / 1000;
    for (const each of document.querySelectorAll("[data-since]")) {
      const seconds = Math.max(0, Math.round(now - Number(each.dataset.since)));
      const text = seconds < 60 ? `${seconds}s` : `${Math.floor(seconds / 60)}m ${seconds % 60}s`;
      each.textContent = `${text} ago`;
    }
  };

  const prepare = (part) => {
    for (const code of part.querySelectorAll(".remedy code")) {
      if (!navigator.clipboard || !/^qdo /.test(code.textContent)) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "Copy";
      button.setAttribute("aria-label", `Copy: ${code.textContent}`);
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
      code.after(button);
    }
    for (const all of part.querySelectorAll("[data-all]")) {
      all.addEventListener("change", () => {
        for (const box of all.closest("table").querySelectorAll('input[name="letter"]')) {
          box.checked = all.checked;
        }
      });
    }
  };

  prepare(document);
  tick();
  setInterval(tick, 1000);
  if (body.dataset.poll) {
    setInterval(look, POLL_MS);
    document.addEventListener("visibilitychange", look);
  }
})();
