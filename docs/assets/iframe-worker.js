// Search from disk: a browser starts no worker from a file. Its script runs in a hidden frame instead, with a worker's interface.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const load = (address) =>
        new Promise((loaded, failed) => {
          const script = this.inside.document.createElement("script");
          Object.assign(script, { src: address, onload: loaded, onerror: failed });
          this.inside.document.head.append(script);
        });
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...addresses) => addresses.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
      load(url).then(() => {
        this.loaded = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }
    postMessage(data) {
      if (this.loaded) this.inside.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
  };
}
