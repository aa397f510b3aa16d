// Verify recorded games, given as JSON: node verify.mjs PAGE ARTIFACT <REQUEST. Prints the result of each.
import { readFileSync } from "node:fs";

const [page, path] = process.argv.slice(2);
const { load, folder } = await import(`${page}/fastcar.mjs`);
const { verify } = await import(`${page}/game.mjs`);
const { world, games } = JSON.parse(readFileSync(0, "utf8"));
const artifact = await load(folder(path));
const found = [];
for (const game of games) found.push(await verify(artifact, world, game));
console.log(JSON.stringify(found));
