// Copies many slices and computes their CRC-32C in the same pass. Compiled at run time by NVRTC (gather.cpp holds this
// file as text), and by the tests as C++: it uses nothing that a shim of a few lines cannot give.
//
// CRC-32C without its first and last inversion is linear: the CRC of a message is the exclusive or of the CRCs of its
// parts, each moved on by the bytes behind it. So every lane of a warp takes each 32nd element of 16 bytes of a piece,
// moves its state over the 31 elements of the others by a table, moves the result once by all that is behind it in the
// block, and adds it to the block's sum with one atomic operation. Lanes never wait for each other, and the processor
// adds the inversions.
typedef unsigned int u32;
typedef unsigned long long u64;

struct GatherPiece {
  u64 from;    // device address
  u64 to;      // device address, or pinned host memory as the device sees it; 0: only the checksum is wanted
  u64 behind;  // bytes of the block behind this piece
  u32 size;
  u32 block;   // whose sum it adds to
};

// tables[0..3]: a byte at distance 3..0 from the end of a word; tables[4..7]: bytes of a state over 496 zero bytes.
__device__ inline u32 word_step(const u32* tables, u32 state) {
  return tables[state & 255] ^ tables[256 + ((state >> 8) & 255)] ^ tables[512 + ((state >> 16) & 255)] ^
         tables[768 + (state >> 24)];
}

// a * b modulo the polynomial, both with bit 31 as x^0.
__device__ inline u32 multiply(u32 a, u32 b) {
  u32 product = 0;
  for (u32 bit = 0x80000000u; bit != 0 && a != 0; bit >>= 1) {
    if (a & bit) {
      product ^= b;
      a ^= bit;
    }
    b = (b & 1) ? (b >> 1) ^ 0x82f63b78u : b >> 1;
  }
  return product;
}

// The state moved over `count` zero bytes; powers[k] is x^(8 * 2^k).
__device__ inline u32 move_on(const u32* powers, u32 state, u64 count) {
  for (u32 k = 0; count != 0; ++k, count >>= 1) {
    if (count & 1) state = multiply(powers[k], state);
  }
  return state;
}

extern "C" __global__ void gather_crc(const GatherPiece* pieces, u32 count, const u32* constants, u32* sums) {
  __shared__ u32 tables[2048];
  for (u32 i = threadIdx.x; i < 2048; i += blockDim.x) tables[i] = constants[i];
  __syncthreads();
  const u32* powers = constants + 2048;
  const u32 lane = threadIdx.x & 31;
  const u32 number = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (number >= count) return;
  const GatherPiece piece = pieces[number];
  u32 state = 0;
  u64 behind = piece.behind;
  if (((piece.from | piece.to | piece.size) & 15) == 0) {
    const uint4* from = (const uint4*)piece.from;
    uint4* to = (uint4*)piece.to;
    const u32 elements = piece.size >> 4;
    if (lane >= elements) return;
    u32 at = lane;
    for (;;) {
      const uint4 word = from[at];
      if (to != 0) to[at] = word;
      state = word_step(tables, state ^ word.x);
      state = word_step(tables, state ^ word.y);
      state = word_step(tables, state ^ word.z);
      state = word_step(tables, state ^ word.w);
      if (elements - at <= 32) break;
      state = word_step(tables + 1024, state);
      at += 32;
    }
    behind += (u64)(elements - 1 - at) << 4;
  } else {
    const unsigned char* from = (const unsigned char*)piece.from;
    unsigned char* to = (unsigned char*)piece.to;
    const u32 share = (piece.size + 31) >> 5;
    const u32 begin = lane * share;
    if (begin >= piece.size) return;
    const u32 end = begin + share < piece.size ? begin + share : piece.size;
    for (u32 at = begin; at < end; ++at) {
      const unsigned char byte = from[at];
      if (to != 0) to[at] = byte;
      state = tables[768 + ((state ^ byte) & 255)] ^ (state >> 8);
    }
    behind += piece.size - end;
  }
  atomicXor(&sums[piece.block], move_on(powers, state, behind));
}
