package load

import "encoding/binary"

// A request begins with a header, which its response repeats:
//
//	byte  0     the kind: askSize, askLast or askAddress
//	      1     0
//	      2-3   size of the request, header included
//	      4-5   size of the response, header included
//	      6-9   number of the request
//
// Numbers are big endian. The rest is zeros, but that the response to askAddress
// continues with the 16 bytes of the address at which the request arrived.
const (
	headerSize  = 10
	addressSize = headerSize + 16
)

const (
	askSize    = 's' // an answer of that size, no more
	askLast    = 'l' // the same, and then the end of the connection
	askAddress = 'w' // the address of the server
)

// newRequest returns a request with the number 0.
func newRequest(ask byte, size, answer int) []byte {
	request := make([]byte, size)
	request[0] = ask
	binary.BigEndian.PutUint16(request[2:], uint16(size))
	binary.BigEndian.PutUint16(request[4:], uint16(answer))

	return request
}

func setNumber(request []byte, number uint32) { binary.BigEndian.PutUint32(request[6:], number) }

// sizes reads from a header how large the request and its response are. It is
// false if this is no request.
func sizes(header []byte) (request, response int, ok bool) {
	request = int(binary.BigEndian.Uint16(header[2:]))
	response = int(binary.BigEndian.Uint16(header[4:]))
	least := headerSize
	if header[0] == askAddress {
		least = addressSize
	}
	ok = (header[0] == askSize || header[0] == askLast || header[0] == askAddress) &&
		request >= headerSize && request <= maxRequest && response >= least && response <= maxResponse

	return request, response, ok
}
