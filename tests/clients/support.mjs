// What the suites share: a server of their own, and what the model is known to say.

import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

/** A tool that the model knows how to call. */
export const timer = JSON.parse(readFileSync(new URL("../../models/lily-tiny/tools.json", import.meta.url)));

/** What the model says to the recorded prompts, by their ids. */
export const recorded = Object.fromEntries(
  readFileSync(new URL("../../models/lily-tiny/expected.jsonl", import.meta.url), "utf8")
    .trim().split("\n").map(JSON.parse).map((one) => [one.id, one]),
);

/** Starts a server with the embedded model at a free port. */
export async function startServer({ key, options = [] } = {}) {
  const environment = { ...process.env };
  delete environment.LILY_API_KEY;
  if (key) environment.LILY_API_KEY = key;
  const child = spawn(process.env.LILY, ["serve", "--port", "0", "--precision", "f32", ...options], {
    env: environment,
    stdio: ["ignore", "ignore", "pipe"],
  });
  // Also where tests were cut short.
  process.on("exit", () => child.kill("SIGKILL"));
  const said = [];
  const url = await new Promise((resolve, reject) => {
    createInterface({ input: child.stderr }).on("line", (line) => {
      said.push(line);
      const found = line.match(/listening at (http:\/\/[^/]+)\/v1/);
      if (found) resolve(found[1]);
    });
    child.on("error", reject);
    child.on("exit", (status) => reject(new Error(`lily ended with ${status}:\n${said.join("\n")}`)));
  });
  const stop = () => new Promise((resolve) => {
    if (child.exitCode !== null) return resolve();
    child.on("exit", resolve);
    child.kill("SIGTERM");
  });
  return { url, stop };
}

/** How many requests the server has. */
export async function requests(server) {
  const response = await fetch(`${server.url}/health`);
  return (await response.json()).requests;
}

/** Waits until something holds, for at most ten seconds. */
export async function until(what, holds) {
  for (let tries = 0; tries < 400; tries += 1) {
    if (await holds()) return;
    await new Promise((resolve) => setTimeout(resolve, 25));
  }
  throw new Error(`not in ten seconds: ${what}`);
}
