// A page that is opened from a disk may not start workers, so the search of the site would be off.
// There, a worker is a frame without a picture that runs the same script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame.contentWindow;
      const load = (src) => new Promise((resolve, reject) => {
        const script = this.frame.document.createElement("script");
        Object.assign(script, { src, onload: resolve, onerror: reject });
        this.frame.document.body.append(script);
      });
      // What a worker's script calls.
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.importScripts = (...urls) => urls.reduce((last, src) => last.then(() => load(src)), Promise.resolve());
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.frameElement.remove();
    }
  };
}
