import sys, time, torch, traceback
from cases import *
from moelink.testing import run_ranks
def bench(rank, world):
    import moelink, torch, torch.distributed as dist, time; torch.cuda.set_device(rank)
    out={}
    for T,fmt in ((1,"bf16"),(128,"bf16"),(128,"fp8_block128"),(4096,"bf16"),(4096,"fp8_block128")):
        ep=moelink.init(num_experts=256,topk=8,hidden_size=7168,max_tokens_per_rank=T,dispatch_format=fmt,transport="symmetric",capacity=min(T*8*world,40000 if T==4096 else 10**9))
        x=torch.randn(T,7168,device="cuda",dtype=torch.bfloat16); ids=torch.rand(T,256,device="cuda").topk(8).indices.int(); w=torch.rand(T,8,device="cuda")
        r=ep.dispatch(x,ids,w); y=torch.randn(r.tokens.shape[0],7168,device="cuda",dtype=torch.bfloat16); o=ep.combine(y,r)
        torch.cuda.synchronize(); dist.barrier()
        for name,f in (("dispatch",lambda: ep.dispatch(x,ids,w)),("combine",lambda: ep.combine(y,r,out=o))):
            for _ in range(3): f()
            torch.cuda.synchronize(); dist.barrier()
            n=20
            g=torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(g):
                    for _ in range(n): f()
                g.replay(); torch.cuda.synchronize(); dist.barrier()
                a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
                a.record(); g.replay(); b.record(); torch.cuda.synchronize()
                out[(T,fmt,name)]=round(a.elapsed_time(b)/n*1e3,1)
            except Exception as e:
                out[(T,fmt,name)]=repr(e)[:300]
            dist.barrier()
            del g
        ep.check()
        ep.close()
    return out
if __name__=="__main__":
    W=torch.cuda.device_count()
    which=sys.argv[1]
    t=time.time()
    if which=="cases":
        fmts=sys.argv[2].split(",")
        cs=[c for c in matrix()+features() if c.setup.dispatch_format in fmts]
        try:
            res=run_ranks(run_cases,W,cs,{"transport":sys.argv[3]},timeout=300)
            bad=0
            for i,c in enumerate(cs):
                try: check_case(c,W,[r[i] for r in res])
                except AssertionError as e:
                    bad+=1
                    if bad<15: print("BAD",c.id,str(e)[:300])
            print(sys.argv[3],fmts,W,"ranks",len(cs),"cases",bad,"bad",round(time.time()-t,1),"s")
        except Exception as e:
            print("FAILED",str(e)[-3000:])
    else:
        for r in run_ranks(bench,W,timeout=300)[:1]:
            for k,v in r.items(): print(k,v)
        print(round(time.time()-t,1),"s")
