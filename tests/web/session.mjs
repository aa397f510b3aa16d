// What fastcar.mjs makes of an artifact, as JSON: node session.mjs MODULE ARTIFACT <REQUEST. Logits are bytes in hexadecimal.
import { readFileSync } from "node:fs";

const [module, path] = process.argv.slice(2);
const { load, folder, numerator, Sampler } = await import(module);
const { prompt, tokens, thresholds, draws, differences } = JSON.parse(readFileSync(0, "utf8"));
const hex = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength).toString("hex");
try {
  const artifact = await load(folder(path));
  const games = thresholds.map((threshold) => {
    const session = artifact.session();
    if (threshold !== "compiled") session.setThreshold(threshold);
    return { session, logits: [hex(session.prefill(prompt))], decisions: [] };
  });
  // The sessions take turns: they share the weights and the library's buffers, and nothing else.
  for (const token of tokens) {
    for (const game of games) {
      game.logits.push(hex(game.session.step(token)));
      game.decisions.push(Array.from(game.session.decisions));
    }
  }
  const drawn = draws.map(({ options, logits }) => {
    const sampler = new Sampler(options);
    return logits.map((row) => sampler.choose(Float32Array.from(row)));
  });
  const found = games.map(({ session, logits, decisions }) => ({ logits, decisions, ratio: session.replayRatio }));
  console.log(JSON.stringify({ games: found, drawn, numerators: differences.map(numerator) }));
} catch (error) {
  console.log(JSON.stringify({ error: `${error.constructor.name}: ${error.message}` }));
}
