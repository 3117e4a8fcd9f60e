import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.DatagramPacket;
import java.net.DatagramSocket;
import java.net.InetSocketAddress;

/** Sends each line of its input as a datagram, on a socket that connects once. */
public class Sender {
    public static void main(String[] args) throws IOException {
        DatagramSocket socket = new DatagramSocket();
        socket.connect(new InetSocketAddress(args[0], Integer.parseInt(args[1])));
        Thread receiver = new Thread(() -> receive(socket));
        receiver.setDaemon(true);
        receiver.start();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = lines.readLine()) != null; ) {
            byte[] bytes = line.getBytes();
            try {
                socket.send(new DatagramPacket(bytes, bytes.length));
            } catch (IOException e) {
                System.err.println(e);
            }
        }
    }

    private static void receive(DatagramSocket socket) {
        while (true) {
            DatagramPacket answer = new DatagramPacket(new byte[1500], 1500);
            try {
                socket.receive(answer);
                System.out.println(new String(answer.getData(), 0, answer.getLength()));
            } catch (IOException e) {
                System.err.println(e);
            }
        }
    }
}
