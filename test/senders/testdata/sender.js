// Sends each line of its input as a datagram, on a socket that connects once.
const [address, port] = process.argv.slice(2);
const socket = require("dgram").createSocket(address.includes(":") ? "udp6" : "udp4");

socket.on("error", (error) => console.error(String(error)));
socket.on("message", (answer) => console.log(String(answer)));
socket.connect(Number(port), address, () => {
  require("readline")
    .createInterface({ input: process.stdin })
    .on("line", (line) => socket.send(line));
});
