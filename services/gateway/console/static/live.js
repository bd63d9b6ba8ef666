// One stream of events at a time: what the gateway's collector sees of a topic.

const AGAIN_MS = 2000;

/**
 * Listens to a topic until `close` is called.
 * take: called with each document. state: called with "live", "waiting" or a sentence. ended: the session is over.
 */
export function listen(topic, { take, state, ended }) {
  let source = null;
  let timer = 0;
  let closed = false;

  function open() {
    source = new EventSource(`/console/live?topic=${encodeURIComponent(topic)}`);
    source.onmessage = (event) => {
      let document;
      try {
        document = JSON.parse(event.data);
      } catch {
        return; // cut off in the middle; the next one is whole
      }
      state("live");
      take(document);
    };
    source.onerror = () => {
      state("waiting");
      if (source.readyState === EventSource.CLOSED) again();
    };
  }

  /** The browser gave up, because the answer was an error: find out which. */
  async function again() {
    source.close();
    try {
      const answer = await fetch("/console/session");
      const said = await answer.json();
      if (closed) return;
      if (!said.signed_in) return ended();
    } catch {
      // The gateway does not answer; it may come back.
    }
    if (!closed) timer = setTimeout(open, AGAIN_MS);
  }

  state("waiting");
  open();
  return {
    close() {
      closed = true;
      clearTimeout(timer);
      source.close();
    },
  };
}
