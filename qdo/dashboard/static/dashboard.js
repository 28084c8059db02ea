// Keeps an open page up to date. Every page works without it.
"use strict";
(() => {
  const POLL_MS = 30000;
  const body = document.body;
  const connection = document.getElementById("connection");
  let source = null;
  let poll = 0;
  let loading = false;
  let again = false;

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
    body.dataset.reading = fresh.body.dataset.reading || "";
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
    if (loading) {
      again = true;
      return;
    }
    loading = true;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
      if (answer.redirected) {
        location.reload();  // the session has ended
      } else if (answer.ok || answer.status === 404) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (document.querySelector('meta[http-equiv="refresh"]')) location.reload();
        else show(fresh);
      }
    } catch (error) {
      say("not connected, trying again");
    } finally {
      loading = false;
      if (again) {
        again = false;
        setTimeout(refresh, 500);
      }
    }
  };

  const close = () => {
    if (source) source.close();
    source = null;
    clearInterval(poll);
    poll = 0;
  };

  const open = () => {
    close();
    // The first event comes at once if there is a newer reading than the one on the page.
    const known = encodeURIComponent(body.dataset.reading || "");
    source = new EventSource(`${body.dataset.events}?known=${known}`);
    source.addEventListener("open", () => say(""));
    source.addEventListener("reading", refresh);
    source.onerror = () => {
      say("not connected, trying again");
      if (source && source.readyState === EventSource.CLOSED) {
        // Refused: too many open pages, or the session has ended. Ask now and then.
        close();
        poll = setInterval(() => { refresh().then(() => say("")); }, POLL_MS);
        setTimeout(() => { if (!document.hidden) open(); }, 2 * POLL_MS);
      }
    };
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
      if (!navigator.clipboard || !/^qdo [^,]+$/.test(code.textContent)) continue;
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
  if (body.dataset.events && window.EventSource) {
    open();
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) {
        close();
      } else {
        open();
      }
    });
    window.addEventListener("pagehide", close);
    window.addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  }
})();
