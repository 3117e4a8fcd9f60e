package maps

// IndexBits is how many bits of an id are its index, see [Index].
const IndexBits = uint32(abiIdLayoutINDEX_BITS)

// MaxServicePorts is how many service ports can be counted, and therefore have ids.
const MaxServicePorts = maxChunks * int(abiChunkCHUNK_COUNTS)

// Index returns the place in an array that an id of a service port or a backend stands
// for. Ids of one index differ by their generation.
func Index(id uint32) uint32 { return id & uint32(abiIdLayoutINDEX_MASK) }

// ID returns the id of a place in this generation, of which the low 8 bits count.
func ID(index, generation uint32) uint32 { return index | generation<<IndexBits }

// Generation returns which generation of its place an id stands for.
func Generation(id uint32) uint32 { return id >> IndexBits }
